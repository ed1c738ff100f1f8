"""`hpctrain checkpoints`: list, verify, export and import."""

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import nn

import hpctrain
from hpctrain.checkpoint.convert.import_export import load_on_cpu
from hpctrain.cli.main import cli
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir, list_checkpoint_steps
from hpctrain.telemetry.report.pages import render_run_page
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.run_results import describe_results, read_results
from hpctrain.telemetry.report.summary import key_figures

Command = Callable[..., Result]


class Net(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(run_dir: Path, max_steps: int, module: Net | None = None, **settings) -> Net:
    trainer = hpctrain.Trainer(
        max_steps=max_steps, global_batch_size=4, run_dir=run_dir, seed=1, checkpoint_every=2, **settings
    )
    module = module or Net()
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, list(data), list(data))
    return module


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `hpctrain checkpoints …` in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> Result:
        return CliRunner().invoke(cli, ["checkpoints", *args])

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A run with checkpoints of steps 2, 4 and 6, and its final module."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, train(folder, 6, keep_best=1, validate_every=2)


@pytest.fixture
def run(trained: tuple[Path, Net], tmp_path: Path) -> RunDir:
    """A copy of that run, which tests may damage."""
    subprocess.run(["cp", "-r", str(trained[0]), str(tmp_path / "run")], check=True)
    return RunDir(tmp_path / "run")


def test_list_shows_step_size_ranks_newest_and_best(command: Command, run: RunDir) -> None:
    text = command("run")
    assert text.exit_code == 0
    head, *rows = text.stdout.splitlines()
    assert head.split() == ["step", "saved", "size", "files", "ranks", "tier", "val_loss"]
    assert [row.split()[0] for row in rows] == ["2", "4", "6"]
    assert "newest" in rows[-1]
    records = json.loads(command("run", "--json").stdout)
    scores = {record["step"]: record["score"] for record in records}
    assert [record["best"] for record in records] == [
        step == min(scores, key=lambda step: scores[step]) for step in scores
    ]
    for record in records:
        files = [path for path in Path(record["path"]).iterdir() if path.name != "manifest.json"]
        assert record["files"] == len(files)
        assert record["bytes"] == sum(path.stat().st_size for path in files)
        assert (record["world_size"], record["tier"], record["problems"]) == (1, "shared", [])


class ScoredNet(Net):
    """A module with given accuracies, of which the best ones are equal."""

    def validation_step(self, batch, batch_idx):
        num_steps = int(self.net[1].num_batches_tracked)
        return {"loss": 0.5, "acc": {4: 0.9, 6: 0.9}.get(num_steps, 0.1)}


@pytest.mark.parametrize(("keep_best", "kept"), [(1, [6, 8]), (0, [4, 6, 8])])
def test_all_views_name_the_same_best_checkpoint(command, tmp_path, keep_best, kept) -> None:
    settings = {"keep_best": keep_best, "keep_last": len(kept) - keep_best, "monitor": "acc"}
    train(tmp_path / "run", 8, ScoredNet(), mode="max", validate_every=2, **settings)
    run = RunDir(tmp_path / "run")
    assert list_checkpoint_steps(run.checkpoints) == kept
    records = json.loads(command("run", "--json").stdout)
    assert [record["step"] for record in records if record["best"]] == [6]
    assert command("export", "run", "best.pt", "--best").stdout.count("(step 6)") == 1
    status = describe_results(read_results(run))["best"]
    assert status == "acc 0.9 at step 6; best checkpoint: step 6"
    run_data = RunData(run, "COMPLETED", now=0.0)
    assert ("acc", "0.9", "best, at step 6; best checkpoint: step 6") in key_figures(run_data)
    assert f"Best checkpoint: <code>{run.checkpoint(6)}<" in render_run_page(run_data)


def test_verify_reports_each_damaged_file(command: Command, run: RunDir) -> None:
    newest = run.checkpoint(6)
    state, tensors = newest / "state.json", newest / "tensors.json"
    content = bytearray(state.read_bytes())
    content[5] ^= 1
    state.write_bytes(content)
    tensors.unlink()
    assert command("run").exit_code == 0, "without --verify, files are not read"
    verified = command("run", "--verify")
    assert verified.exit_code == 1
    assert f"step 6: {state} has checksum" in verified.stderr
    assert f"step 6: {tensors} is missing" in verified.stderr
    assert "1 checkpoint is damaged. A run skips damaged checkpoints" in verified.stderr
    assert [line.split()[0] for line in verified.stdout.splitlines() if "newest" in line] == ["4"]
    listed = command("run", "--verify", "--json")
    assert listed.exit_code == 1
    assert [len(record["problems"]) for record in json.loads(listed.stdout)] == [0, 0, 2]
    for step in (2, 4):
        (run.checkpoint(step) / "state.json").unlink()
    assert "3 checkpoints are damaged. A run in this folder fails" in command("run", "--verify").stderr


def test_list_shows_checkpoints_set_aside(command: Command, run: RunDir) -> None:
    (run.checkpoint(6) / "manifest.json").unlink()
    assert command("run").exit_code == 1
    train(run.path, 6)
    result = command("run")
    assert result.exit_code == 0
    assert "step-00000006.broken-0: damaged" in result.stderr
    records = json.loads(command("run", "--json").stdout)
    assert [record["step"] for record in records if record["set_aside"]] == [6]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_exported_weights_load_without_hpctrain(command, trained, name):
    result = command("export", str(trained[0]), name)
    assert result.exit_code == 0, result.stderr
    assert "(step 6)" in result.stdout
    plain = nn.Module()
    plain.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    weights = load_file(name) if name.endswith(".safetensors") else torch.load(name, weights_only=True)
    plain.load_state_dict(weights)
    for key, value in trained[1].state_dict().items():
        assert torch.equal(plain.state_dict()[key], value), key
    assert [path.name for path in Path.cwd().iterdir()] == [name], "a temporary file is left"


def test_export_selects_by_step_or_score_and_never_overwrites(command, trained):
    run = str(trained[0])
    Path("a.pt").write_text("precious")
    refused = command("export", run, "a.pt")
    assert refused.exit_code == 2
    assert "a.pt already exists. Use --force" in refused.stderr
    assert Path("a.pt").read_text() == "precious"
    assert command("export", run, "a.pt", "--force", "--step", "4").exit_code == 0
    expected = load_on_cpu(RunDir(trained[0]).checkpoint(4)).state["module"]
    assert torch.equal(torch.load("a.pt", weights_only=True)["net.0.weight"], expected["net.0.weight"])
    assert "(step " in command("export", run, "best.pt", "--best").stdout
    for args, message in (
        (["b.pt", "--step", "3"], "No checkpoint of step 3"),
        (["b.onnx"], "extension of b.onnx must be .safetensors, .pt or .pth"),
        (["b.safetensors", "--all"], "can store only tensors"),
        (["nowhere/b.pt"], "nowhere"),
        (["b.pt", "--step", "4", "--best"], "Use only one of these options"),
    ):
        result = command("export", run, *args)
        assert result.exit_code in (1, 2)
        assert message in result.stderr


def test_export_skips_damaged_checkpoint_with_a_warning(command: Command, run: RunDir) -> None:
    with open(run.checkpoint(6) / "state.json", "ab") as file:
        file.write(b" ")
    result = command("export", "run", "model.pt")
    assert result.exit_code == 0
    assert "(step 4)" in result.stdout
    assert "Using the previous checkpoint" in result.stderr
    explicit = command("export", "run", "other.pt", "--step", "6")
    assert explicit.exit_code == 1
    assert not Path("other.pt").exists()


def test_full_export_round_trips_through_import(command: Command, trained: tuple[Path, Net]) -> None:
    assert command("export", str(trained[0]), "all.pt", "--all", "--step", "4").exit_code == 0
    torch.load("all.pt", weights_only=True)
    result = command("import", "copy", "all.pt")
    assert result.exit_code == 0, result.stderr
    assert "imported: 9 weights and buffers, 1 optimizer, 1 scheduler" in result.stdout
    continued = train(Path("copy"), 6)
    for key, value in trained[1].state_dict().items():
        assert torch.equal(continued.state_dict()[key], value), key


def test_import_of_state_dict_starts_a_run(command: Command) -> None:
    module = Net()
    torch.save({f"module._orig_mod.{key}": value for key, value in module.state_dict().items()}, "plain.pt")
    result = command("import", "new", "plain.pt")
    assert result.exit_code == 0, result.stderr
    assert "removed the prefix 'module.' (added by DistributedDataParallel)" in result.stdout
    assert "no optimizer state: the optimizer starts from scratch" in result.stdout
    loaded = load_on_cpu(RunDir(Path("new")).checkpoint(0))
    assert torch.equal(loaded.state["module"]["net.0.weight"], module.net[0].weight)
    Path("train.py").write_text("pass")
    submitted = CliRunner().invoke(
        cli, ["submit", "--dry-run", "--backend", "local", "--run-dir", "new", "train.py"]
    )
    assert submitted.exit_code == 0, submitted.stderr
    train(Path("new"), 2)
    assert next(read_json_lines(RunDir(Path("new")).events))["kind"] == "resumed"


@pytest.mark.parametrize(("wrapper", "compiles"), [("_orig_mod", True), ("_fsdp_wrapped_module", False)])
def test_wrapped_submodules_are_imported(command: Command, wrapper: str, *, compiles: bool) -> None:
    module = Net()
    state = {key.replace(".", f".{wrapper}.", 1): value for key, value in module.state_dict().items()}
    torch.save(state, "plain.pt")
    result = command("import", "new", "plain.pt", "--step", "1")
    assert result.exit_code == 0, result.stderr
    assert "removed" in result.stdout

    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            if compiles:
                self.net = torch.compile(self.net, backend="eager")

    new = Compiled()
    hpctrain.Trainer(max_steps=1, global_batch_size=4, run_dir="new").fit(new, list(torch.randn(12, 4)))
    for ours, theirs in zip(new.state_dict().values(), module.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_lightning_checkpoint_is_imported_with_its_optimizer(command: Command, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it and does not restore it
    import lightning

    class LightningNet(lightning.LightningModule):
        def __init__(self, args: argparse.Namespace) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net().net

        def training_step(self, batch, batch_idx):
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    module = LightningNet(argparse.Namespace(lr=0.1))
    data = torch.utils.data.DataLoader(list(torch.randn(12, 4)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint("last.ckpt")
    refused = command("import", "new", "last.ckpt")
    assert refused.exit_code == 2
    assert "refers to argparse.Namespace, so loading the file could execute code" in refused.stderr
    assert "--allow argparse.Namespace" in refused.stderr
    assert not Path("new").exists()
    result = command("import", "new", "last.ckpt", "--allow", "argparse.Namespace")
    assert result.exit_code == 0, result.stderr
    assert f"step 5, from last.ckpt (Lightning {lightning.__version__})" in result.stdout
    assert "hyper_parameters" in result.stdout.split("omitted: ")[1].splitlines()[0]
    assert "the position in the data" in result.stdout
    state = load_on_cpu(RunDir(Path("new")).checkpoint(5)).state
    moments = trainer.optimizers[0].state_dict()["state"]
    for index, values in moments.items():
        assert torch.equal(state["optimizers"][0]["state"][index]["exp_avg"], values["exp_avg"])
    continued = hpctrain.Trainer(max_steps=6, global_batch_size=4, run_dir="new")
    continued.fit(Net(), list(torch.randn(12, 4)))
    assert continued.step == 6


class Trap:
    """Code in a file, which an import does not execute."""

    def __reduce__(self):
        return (print, ("executed",))


def test_unsupported_import_is_refused(command: Command, run: RunDir) -> None:
    torch.save({"epochs": 3, "loss": 0.5}, "nothing.pt")
    Path("text.pt").write_text("no checkpoint")
    Path("hello.pt").write_text("hello")
    Path("empty.pt").touch()
    Path("text.safetensors").write_text("no checkpoint")
    torch.save({"state_dict": {"w": torch.zeros(1)}, "step": 4}, "old.pt")
    torch.save(torch.zeros(1), "tensor.pt")
    torch.save({"state_dict": {"w": torch.zeros(1)}, "more": Trap()}, "trap.pt")
    for args, message in (
        (["new", "nothing.pt"], "contains no state_dict"),
        (["new", "text.pt"], "cannot be loaded by torch.load"),
        (["new", "text.safetensors"], "is not a safetensors file"),
        (["new", "hello.pt"], "cannot be loaded by torch.load: "),
        (["new", "empty.pt"], "cannot be loaded by torch.load: EOFError"),
        ([".", "old.pt"], "neither a run folder nor empty"),
        (["new", "trap.pt"], "print"),
        (["new", "tensor.pt"], "contains an object of type Tensor"),
        (["new", "old.pt", "--allow", "no.such.Class"], "'no.such.Class' (--allow) cannot be imported"),
        (["run", "old.pt"], "contains a checkpoint of step 6, but old.pt would be imported as step 4"),
    ):
        result = command("import", *args)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "executed" not in result.output
    assert not Path("new").exists()


def test_import_into_active_run_is_refused(command: Command) -> None:
    run = RunDir(Path("runs/going").absolute())
    run.path.mkdir(parents=True)
    run.spec.touch()
    run.log_event("submitted", 0, job_id="17", backend="slurm")
    torch.save({"w": torch.zeros(1)}, "w.pt")
    result = command("import", "going", "w.pt")
    assert result.exit_code == 2
    assert "Run going is UNKNOWN" in result.stderr
