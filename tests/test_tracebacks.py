from __future__ import annotations

from pathlib import Path

from hpctrain.records.crash_output import fold

PACKAGE = Path(__file__).parents[1] / "hpctrain"
TORCH = "/opt/lib/python3.12/site-packages/torch"

TRACE = f"""\
Traceback (most recent call last):
  File "/home/me/torch/train.py", line 26, in <module>
    trainer.fit(Line(), data)
  File "{PACKAGE}/training/trainer.py", line 98, in fit
    fit.run()
  File "{TORCH}/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  [Previous line repeated 3 more times]
  File "/home/me/torch/train.py", line 18, in training_step
    table("x")
    ~~~~~^^^^^
KeyError: 'x'
"""


def test_frames_of_hpctrain_and_torch_are_folded():
    assert fold(TRACE).splitlines() == [
        "Traceback (most recent call last):",
        '  File "/home/me/torch/train.py", line 26, in <module>',
        "    trainer.fit(Line(), data)",
        "  … 2 frames of hpctrain and torch",
        '  File "/home/me/torch/train.py", line 18, in training_step',
        '    table("x")',
        "    ~~~~~^^^^^",
        "KeyError: 'x'",
    ]


def test_traceback_that_ends_in_torch_keeps_the_error():
    inside = f'  File "{TORCH}/nn/functional.py", line 1, in linear\n    return f(x)\n'
    text = (
        f'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    g()\n{inside}RuntimeError: m'
    )
    assert fold(text).splitlines()[-2:] == ["  … 1 frame of hpctrain and torch", "RuntimeError: m"]


def test_traceback_without_user_frames_is_unchanged():
    text = f'Traceback (most recent call last):\n  File "{PACKAGE}/x.py", line 1, in f\n    g()\nOSError: m\n'
    assert fold(text) == text


def test_multi_line_message_is_kept():
    message = "ValueError: first\n    second, indented\nthird\n"
    assert fold(TRACE.replace("KeyError: 'x'\n", message)).endswith(message)
