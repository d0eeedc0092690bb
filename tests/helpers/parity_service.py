"""Ranks that stay up and train one case after another: a launch costs ten seconds, a case two."""

import contextlib
import json
import socket
import subprocess
import tempfile
from pathlib import Path

import orderings
from cases import ALL_LAYOUTS, STRICT, TENSOR
from places import ROOT
from training import environment, ranks_command
from warm_python import WarmPython

WORKER = Path(__file__).with_name("parity_worker.py")


class Died(Exception):
    """The ranks ended; the text is what they printed last."""


class ParityService:
    """The ranks of one layout, two or four. They start with the first case, and anew after they died.

    Args:
        layout: a name in ``cases.ALL_LAYOUTS``.
        case_seconds: after so long a case counts as hanging.
        strict: whether orderings can be taken away; always at the layouts ``STRICT`` and ``TENSOR``.
    """

    def __init__(self, layout: str, case_seconds: float = 300, strict: bool = False):
        self.layout, self.case_seconds, self.strict = layout, case_seconds, strict or layout in (STRICT, TENSOR)
        self._ranks = self._stream = None

    def run(self, **case) -> dict:
        """``{"reference": metrics, "scheduled": metrics}`` of a case: ``options``, ``schedule``
        (a path), ``environment`` of the scheduled run, ``reference`` (default True), ``reference_schedule`` (another),
        ``iterations`` (default: the worker's), ``meddle`` (see the worker), ``trace`` (a path for the scheduled run's,
        which then counts bytes), ``strict`` (arguments of
        ``strict_device.StrictDevice`` for the scheduled run; the answer says then what it has found).

        Raises:
            Died: a rank failed.
        """
        if self._ranks is None:
            self._start()
        try:
            self._stream.write(
                json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in case.items()})
                + "\n"
            )
            self._stream.flush()
            answer = self._stream.readline()
        except OSError as error:
            answer = ""
            self._output.write(f"{error}\n")
            self._ranks.terminate()  # a case that hangs does not end by itself
        if not answer:
            raise Died(self._stop())
        return json.loads(answer)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(1)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the service
        ranks = 2 if self.layout == STRICT else 4
        command = ranks_command(str(WORKER), [address, *ALL_LAYOUTS[self.layout]], ranks)
        variables = environment({"PYTHONFAULTHANDLER": "1"} | ({orderings.VARIABLE: "1"} if self.strict else {}))
        self._ranks = WarmPython(command[1:], ROOT, variables, self._output, self._output)
        connection = None
        while connection is None:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._ranks.poll() is not None:
                    raise Died(self._stop()) from None
        listener.close()
        connection.settimeout(self.case_seconds)
        self._stream = connection.makefile("rw")

    def _stop(self) -> str:
        """End the ranks; returns the end of what they printed."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # ranks that are gone take nothing
                self._stream.close()
            self._stream = None
        try:
            self._ranks.wait(timeout=100)
        except subprocess.TimeoutExpired:
            self._ranks.terminate()
            self._ranks.wait()
        self._ranks = None
        self._output.seek(0)
        text = self._output.read()
        self._folder.cleanup()
        return text[-30_000:]

    def close(self) -> None:
        if self._ranks is not None:
            self._stop()


def differences(answer: dict) -> list[str]:
    """Names of what is not the same to the last bit."""
    names = ("loss", "eval_loss", "grad_norm", "parameter_sha256")
    return [name for name in names if json.dumps(answer["reference"][name]) != json.dumps(answer["scheduled"][name])]
