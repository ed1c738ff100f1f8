"""The program of a rank, and the steps that its optimizer had restored."""

import sys

import pytest
from helpers.fork_server import run_forked

from hpctrain.runtime.program.program import Program


@pytest.mark.parametrize(("name", "kind"), [("litgpt", "script"), ("torchrun", "command")])
def test_console_scripts_run_in_this_process_unless_they_start_ranks(tmp_path, name, kind):
    script = tmp_path / name
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    assert Program.resolve("command", str(script), ["a"]) == Program(kind, str(script), ("a",))


#: Trains an optimizer, with or without the state of another one, and prints the counted steps.
COUNT = """
import sys, torch
from hpctrain.runtime.program.step_hook import install_step_hook
from hpctrain.runtime.rank_activity import activity
name, momentum, loads = sys.argv[1:]
layer = torch.nn.Linear(1, 1)
options = {"momentum": float(momentum)} if name == "SGD" else {}
trained, optimizer = (getattr(torch.optim, name)(layer.parameters(), lr=0.1, **options) for _ in range(2))
layer(torch.ones(1, 1)).sum().backward()
for _ in range(3):
    trained.step()
install_step_hook(is_restart=loads == "loads weights after a restart")
if loads.startswith("loads weights"):
    layer.load_state_dict(layer.state_dict())
if loads == "loads":
    optimizer.load_state_dict(trained.state_dict())
if loads == "loads an empty state":
    optimizer.load_state_dict(optimizer.state_dict())
optimizer.step()
print(activity.restored_steps, activity.optimizer_steps)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("arguments", "restored"),
    [
        (("Adam", "0", "loads"), "3"),
        (("Adam", "0", "starts over"), "0"),
        (("Adam", "0", "loads an empty state"), "0"),
        (("SGD", "0.9", "loads"), "None"),
        (("SGD", "0", "starts over"), "0"),
        (("SGD", "0", "loads weights"), "0"),
        (("SGD", "0", "loads weights after a restart"), "None"),
    ],
)
def test_steps_count_as_restored_only_if_a_state_was_loaded(arguments, restored, tmp_path):
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    assert run_forked(script, arguments, {}).split() == [restored, "1"]
