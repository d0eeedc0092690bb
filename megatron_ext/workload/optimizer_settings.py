"""The settings of Megatron's optimizer that decide how many bytes a rank holds."""

import msgspec

from megatron_ext.formats.checks import Checker
from megatron_ext.workload.bucket_layout import ITEM_BYTES

HALF = ("float16", "bfloat16")


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Dtypes of gradients, main parameters and optimizer states, and where the optimizer steps.

    Attributes:
        gradient_dtype: dtype of Megatron's gradient buffers (``--accumulate-allreduce-grads-in-fp32``).
        main_parameter_dtype: dtype of the optimizer's copies of 16-bit parameters. Other parameters are updated in
            place. int16: the bits of a float32 copy that a bfloat16 parameter lacks.
        moment_dtypes: dtypes of the optimizer's states: two for Adam.
        on_host: whether the optimizer steps in host memory (``--optimizer-cpu-offload``).
        delayed: whether the optimizer steps during the next iteration (``--delayed-parameter-update``).
    """

    gradient_dtype: str = "float32"
    main_parameter_dtype: str = "float32"
    moment_dtypes: tuple[str, ...] = ("float32", "float32")
    on_host: bool = False
    delayed: bool = False

    @property
    def gradient_item_bytes(self) -> int:
        return ITEM_BYTES[self.gradient_dtype]

    @property
    def state_item_bytes(self) -> int:
        """Bytes of optimizer states per element of a parameter."""
        return sum(ITEM_BYTES[dtype] for dtype in self.moment_dtypes)

    def main_item_bytes(self, dtype: str) -> int:
        """Bytes of the optimizer's own copy per element of a parameter of ``dtype``."""
        return ITEM_BYTES[self.main_parameter_dtype] if dtype in HALF or self.on_host else 0

    def placed(self, on_host: bool, delayed: bool = False) -> "OptimizerSettings":
        """The same optimizer in another place. In host memory its main parameters are complete."""
        whole = on_host and self.main_parameter_dtype == "int16"
        main = "float32" if whole else self.main_parameter_dtype
        return msgspec.structs.replace(self, on_host=on_host, delayed=delayed, main_parameter_dtype=main)

    def check(self, *, file=None) -> None:
        """Refuse dtypes that are not known, and delayed updates on the device. Raises InputError."""
        check = Checker(file)
        if self.delayed and not self.on_host:
            check.refuse("needs on_host", "optimizer.delayed", True)
        for name in ("gradient_dtype", "main_parameter_dtype", "moment_dtypes"):
            value = getattr(self, name)
            for dtype in (value,) if isinstance(value, str) else value:
                if dtype not in ITEM_BYTES:
                    check.refuse(f"unknown dtype; known: {', '.join(ITEM_BYTES)}", f"optimizer.{name}", dtype)
