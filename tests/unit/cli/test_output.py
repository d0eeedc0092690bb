"""What verbs print for people and for programs."""

import json

from megatron_ext.cli.output import emit

HOLDS = "holds up to 14682528768 bytes at step 0F0, 682528768 bytes short; 3221225472 bytes (3.00 GiB) elsewhere"


def test_people_read_gib_behind_large_numbers_of_bytes(capsys):
    emit(False, {}, HOLDS)
    said = HOLDS.replace("14682528768 bytes", "14682528768 bytes (13.67 GiB)")
    assert capsys.readouterr().out == said + "\n"
    emit(True, {"note": HOLDS}, HOLDS)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"note": HOLDS} and printed.err == said + "\n"
