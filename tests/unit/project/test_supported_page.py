"""docs/supported.md says what the code refuses and what the tests try."""

import supported_page
from public_scripts import SCRIPTS


def test_the_page_is_what_is_generated():
    said = "run `PYTHONPATH=. python tests/helpers/supported_page.py`"
    assert supported_page.PAGE.read_text() == supported_page.page(), said


def test_most_public_scripts_lack_nothing():
    lacking = [script for script in SCRIPTS if script.refused]
    assert len(SCRIPTS) == 21 and len(SCRIPTS) - len(lacking) >= 15
