import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.supervisor.launch.task_command import prefixed, restore_names_command

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)
PRINT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES.filter(lambda name: name != "LC_CTYPE"), VALUES, max_size=8))
def test_variables_arrive_unchanged_and_not_in_the_command_line(env):
    command = [sys.executable, "-I", "-S", "-c", PRINT]
    argv = restore_names_command(command, env)
    hidden = {name.encode(): os.fsencode(value) for name, value in prefixed(env).items()}
    result = subprocess.run(argv, env=hidden, capture_output=True, check=True)
    seen = json.loads(result.stdout)
    seen.pop("LC_CTYPE", None)  # set by Python
    assert seen == env
    assert argv[-len(command) :] == command
