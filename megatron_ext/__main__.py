"""``python -m megatron_ext`` is the ``megatron-ext`` command."""

from megatron_ext.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
