"""docs/supported.md says what the code refuses and what the tests try."""

import supported_page
from public_scripts import EXPERTS_ARE_SCHEDULED, SCRIPTS, lacks


def test_the_page_is_what_is_generated():
    said = "run `PYTHONPATH=. python tests/helpers/supported_page.py`"
    assert supported_page.PAGE.read_text() == supported_page.page(), said


def test_most_public_scripts_lack_nothing_but_experts():
    """Fifteen of them, when experts are scheduled."""
    lacking = [script for script in SCRIPTS if lacks(script) not in ("", "experts")]
    assert len(SCRIPTS) == 21 and len(SCRIPTS) - len(lacking) >= 15
    assert EXPERTS_ARE_SCHEDULED or any(lacks(script) == "experts" for script in SCRIPTS)
