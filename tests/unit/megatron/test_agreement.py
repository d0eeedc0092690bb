"""All ranks refuse what one of them refuses, with one text."""

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import agreement

MISSING = "S.json: cannot be read"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(None, "node1"), (MISSING, "node2"), (MISSING, "node2")], f"on node2: {MISSING}"),
        ([(MISSING, "node1"), (MISSING, "node2")], MISSING),
        ([(None, "node1"), (MISSING, "node1")], MISSING),
    ],
)
def test_the_node_that_refuses_is_named_unless_all_do(monkeypatch, ranks, said):
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: ranks[0][1])
    everybody = [(error, "", host) for error, host in ranks]

    def gather(own):
        assert own == everybody[0]
        return everybody

    monkeypatch.setattr(agreement, "gather_objects", gather)
    with pytest.raises(InputError) as refused:
        agreement.agree(ranks[0][0], ("", ""), file="S.json")
    assert str(refused.value) == said
