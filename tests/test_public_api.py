"""The public names, and the cost of importing them."""

import sys

from helpers.commands import run_command

import hpctrain

PUBLIC = {
    "submit", "Executor", "SubmitOptions", "Run", "RunState", "RunStatus", "RunDir", "JobSpec",
    "Module", "Trainer", "Callback", "EarlyStopping", "Strategy", "register_strategy",
    "session", "sample_generator", "Mixture", "LengthGroupedBatchSampler", "StatefulBatchSampler",
    "BaguaStrategy", "Checkpointer", "log_metrics", "should_stop",
    "detect", "Ranks", "expand_hostlist", "compress_hostlist",
    "HpctrainError", "UserError", "SpecError", "EnvironmentMismatch", "RunNotFound", "SchedulerError",
    "RunFailed", "WaitTimeout", "RendezvousError", "CheckpointError",
    "CorruptCheckpoint", "DataWorkerKilled", "DiskFull", "BadLoss", "SilentCorruption", "StagingError",
    "Unauthenticated",
}  # fmt: skip


def test_public_names():
    assert set(hpctrain.__all__) == PUBLIC
    assert len(hpctrain.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(hpctrain, name).__name__ == name
        assert name in dir(hpctrain)


def test_every_error_is_public_and_has_an_exit_code():
    from hpctrain import errors

    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes <= PUBLIC
    assert {getattr(errors, name).exit_code for name in classes} == {1, 2, 3, 4}


def test_import_loads_neither_torch_nor_other_modules():
    code = "import hpctrain, sys; print(*[m for m in sys.modules if m.startswith(('torch', 'hpctrain'))])"
    assert run_command([sys.executable, "-c", code]).stdout.split() == [
        "hpctrain._version",
        "hpctrain.errors",
        "hpctrain",
    ]
