"Every bug that can be planted into the compiled choosing is noticed: make test tries a few of them"
import pytest
from common import check_noticed
from test_cpu_choose import BUGS, notices

from pagedlm import cpu_choose


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    check_noticed(notices, cpu_choose, *BUGS[bug], tmp_path/"mutant.py")
