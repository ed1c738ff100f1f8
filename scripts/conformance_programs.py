"""Run public programs unchanged under hpctrain: undisturbed, preempted, with a killed and with a hung rank.

The programs come from packages of this environment and from folders of CONFORMANCE_SOURCES. A sandbox with
two nodes runs them on CPUs, on data and models without content.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpctrain import sandbox
from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

SCENARIOS = ("undisturbed", "preempted", "killed", "hung")
#: Seconds for a run to reach the step at which it is disturbed, and to end.
REACH_LIMIT_S, END_LIMIT_S = 200, 300
SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
SUBMIT = ("submit", "--run-dir=run", "--hang-timeout=10")


@dataclass(frozen=True)
class Program:
    name: str
    #: Distribution whose version is reported, and the source folder, if it needs one.
    distribution: str
    #: Arguments of `submit`.
    submit: tuple[str, ...]
    #: Files that the program saves as checkpoints, and those with its final weights; {} stands for no folder.
    checkpoints: str
    result: str
    #: How it resumes.
    resumes: str
    source: str | None = None
    #: Writes the data and models.
    prepare: Callable[[Path], None] = lambda _: None
    #: Optimizer steps after which it is disturbed; 0 for its first checkpoint.
    disturb_at: int = 0
    #: Batch script, and its number of nodes.
    script: str = ""
    num_nodes: int = 1


@dataclass(frozen=True)
class Outcome:
    program: str
    scenario: str
    state: str
    attempts: int
    seconds: float
    result: str
    status: str
    error: str = ""


def write_tokens(folder: Path) -> None:
    """Write the data of nanoGPT."""
    import numpy as np

    data = folder / "data/noise"
    data.mkdir(parents=True)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))
    for name in ("train", "val"):
        np.random.default_rng(0).integers(0, 64, 20_000, dtype=np.uint16).tofile(data / f"{name}.bin")


def write_images(folder: Path) -> None:
    """Write an ImageFolder for torchvision and timm."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    for index in range(160):
        path = folder / f"images/{'train' if index < 128 else 'val'}/class{index % 2}/{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)


def write_text(folder: Path) -> None:
    """Write a model with random weights, its tokenizer, and text for Hugging Face programs and litgpt."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(folder / "model")
    (folder / "text").mkdir()
    chance = random.Random(0)
    texts = ["".join(chance.choices(letters, k=40)) for _ in range(512)]
    (folder / "text/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for number in range(4):
        (folder / f"text/{number}.txt").write_text("".join(texts))


def write_glue(folder: Path) -> None:
    """Write what Accelerate's example downloads by name: a BERT, the data set of pairs, and its metric."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    model = folder / "bert-base-cased"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=8, **sizes)).save_pretrained(model)
    data = folder / "nyu-mll/glue"
    data.mkdir(parents=True)
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - {split: train, path: train.jsonl}\n"
        "  - {split: validation, path: validation.jsonl}\n---\n"
    )
    chance = random.Random(0)
    for split, size in (("train", 1280), ("validation", 64)):
        pairs = [[" ".join(chance.choices("abc", k=9)) for _ in range(2)] for _ in range(size)]
        rows = [
            {"sentence1": pair[0], "sentence2": pair[1], "label": index % 2, "idx": index}
            for index, pair in enumerate(pairs)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "glue").mkdir()
    (folder / "glue/glue.py").write_text(METRIC)


def write_clip(folder: Path) -> None:
    """Write the configuration of a small CLIP."""
    (folder / "model").mkdir()
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    config = {"model_cfg": {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    (folder / "model/open_clip_config.json").write_text(json.dumps(config))


METRIC = """import datasets
import evaluate
class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references), "f1": 0.0}
"""

ONE_RANK = ("--nodes=1", "--ntasks-per-node=1")
FOUR_RANKS = ("--nodes=2", "--ntasks-per-node=2")

PROGRAMS = [
    Program(
        name="nanoGPT",
        distribution="nanoGPT",
        source="nanoGPT",
        prepare=write_tokens,
        submit=("job.sbatch",),
        checkpoints="out/ckpt.pt",
        result="out/ckpt.pt",
        resumes="its checkpoint, not its random numbers",
        script="[ -e out/ckpt.pt ] && init_from=resume || init_from=scratch\n"
        "python train.py --init_from=$init_from --dataset=noise --device=cpu --compile=False --dtype=float32 "
        "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=4 "
        "--max_iters=300 --lr_decay_iters=300 --eval_interval=30 --eval_iters=4 --log_interval=50\n",
    ),
    Program(
        name="Lightning CLI",
        distribution="lightning",
        source="pytorch-lightning/tests/tests_pytorch/strategies/scripts",
        submit=(
            *(*FOUR_RANKS, "cli_script.py", "fit", "--trainer.accelerator=cpu", "--trainer.num_nodes=2"),
            *("--trainer.devices=2", "--trainer.max_epochs=30", "--trainer.logger=false"),
            *("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=out"),
            *("--trainer.callbacks.save_last=true", "--trainer.callbacks.every_n_epochs=5"),
            *("--trainer.enable_progress_bar=false", "--ckpt_path=last"),
        ),
        checkpoints="out/*.ckpt",
        result="out/last.ckpt",
        resumes="exactly",
    ),
    Program(
        name="Accelerate",
        distribution="accelerate",
        source="accelerate/examples",
        prepare=write_glue,
        submit=(
            *(*FOUR_RANKS, "complete_nlp_example.py", "--cpu", "--with_tracking", "--checkpointing_steps=10"),
            "--output_dir=out",
        ),
        checkpoints="out/step_*/model.safetensors",
        result="out/step_60/model.safetensors",
        resumes="starts over",
    ),
    Program(
        name="TRL",
        distribution="trl",
        prepare=write_text,
        submit=("job.sbatch",),
        checkpoints="out/checkpoint-*/model.safetensors",
        result="out/model.safetensors",
        resumes="exactly",
        num_nodes=2,
        script="latest=$(ls -d out/checkpoint-* 2>/dev/null | sort -V | tail -n 1)\n"
        "export MASTER=$(scontrol show hostnames | head -n 1) ARGS=${latest:+--resume_from_checkpoint=$latest}\n"
        "srun --ntasks-per-node=1 bash -c 'trl sft --num_machines=2 --num_processes=4 "
        "--machine_rank=$SLURM_NODEID --main_process_ip=$MASTER --main_process_port=29511 "
        "--model_name_or_path=model --dataset_name=text --use_cpu --bf16=false --gradient_checkpointing=false "
        "--output_dir=out --save_steps=10 --max_steps=80 --per_device_train_batch_size=1 --max_length=32 "
        "--report_to=none --logging_steps=10 $ARGS'\n",
    ),
    Program(
        name="timm",
        distribution="timm",
        source="pytorch-image-models",
        prepare=write_images,
        submit=("job.sbatch",),
        checkpoints="out/run/last.pth.tar",
        result="out/run/last.pth.tar",
        resumes="its checkpoint, not its random numbers",
        script="[ -e out/run/last.pth.tar ] && resume='--resume out/run/last.pth.tar'\n"
        "python train.py --data-dir=images --device=cpu --model=resnet10t --num-classes=2 --img-size=32 -b=8 "
        "--epochs=4 --workers=0 --output=out --experiment=run --checkpoint-hist=2 --log-interval=8 $resume\n",
    ),
    Program(
        name="open_clip",
        distribution="open_clip_torch",
        source="open_clip",
        prepare=write_clip,
        submit=(
            *(*FOUR_RANKS, "--env=PYTHONPATH=src", "-m", "open_clip_train.main", "--dataset-type=synthetic"),
            *("--train-num-samples=256", "--batch-size=8", "--epochs=8", "--workers=0", "--device=cpu"),
            *("--model=local-dir:model", "--precision=fp32", "--fsdp", "--logs=logs", "--name=run"),
            *("--resume=latest", "--save-most-recent"),
        ),
        checkpoints="logs/run/checkpoints/*.pt",
        result="logs/run/checkpoints/epoch_8.pt",
        resumes="its checkpoint, not its random numbers",
    ),
    Program(
        name="litgpt",
        distribution="litgpt",
        prepare=write_text,
        submit=(
            *(*ONE_RANK, "--env=TORCHDYNAMO_DISABLE=1", "--", "litgpt", "pretrain", "pythia-14m"),
            *("--tokenizer_dir=model", "--data=TextFiles", "--data.train_data_path=text"),
            *("--data.num_workers=0", "--devices=1", "--out_dir=out", "--resume=auto", "--precision=32-true"),
            *("--train.save_interval=5", "--train.global_batch_size=4", "--train.micro_batch_size=2"),
            *("--train.max_tokens=10000", "--train.max_seq_length=64", "--train.lr_warmup_steps=2"),
            *("--eval.interval=1000", "--eval.max_iters=2", "--logger_name=csv"),
        ),
        checkpoints="out/step-*/lit_model.pth",
        result="out/final/lit_model.pth",
        resumes="its checkpoint",
    ),
]


def flatten(value: Any) -> Iterator[Any]:
    """Yield the tensors of a saved object."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value.detach().double().flatten()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from flatten(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)


def load(pattern: str, folder: Path) -> Any:
    """Return the tensors of the newest file that matches."""
    import torch
    from safetensors.torch import load_file

    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not paths:
        return None
    if paths[-1].suffix == ".safetensors":
        saved = load_file(paths[-1])
    else:
        saved = torch.load(paths[-1], map_location="cpu", weights_only=False)
    return torch.cat(list(flatten(saved)))


def run_processes(run: Path) -> list[ProcessInfo]:
    return [process for process in processes() if process.environ.get(RUN_DIR_VARIABLE) == str(run)]


def is_rank(process: ProcessInfo) -> bool:
    """True for Python processes that a batch script starts."""
    return ATTEMPT_VARIABLE in process.environ and Path(process.argv[0]).name.startswith("python")


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


class Driver:
    def __init__(self, box: sandbox.Sandbox, work: Path, sources: Path | None) -> None:
        self.box, self.work, self.sources = box, work, sources

    def hpctrain(self, folder: Path, *args: str) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {
            **os.environ,
            "PATH": path,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        } | self.box.env
        if "PATH" in self.box.env:
            environ["PATH"] = f"{Path(sys.executable).parent}:{self.box.env['PATH']}"
        command = [sys.executable, "-m", "hpctrain", *args]
        result = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=END_LIMIT_S + 60
        )
        if result.returncode and args[0] != "wait":
            raise RuntimeError(f"{' '.join(args[:2])}: {result.stdout}{result.stderr}")
        return result.stdout

    def run(self, program: Program, scenario: str) -> Outcome:
        folder = self.work / program.name.replace(" ", "-") / scenario
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if program.source:
            shutil.copytree(self.sources / program.source, folder, ignore=shutil.ignore_patterns(".git"))
        else:
            folder.mkdir()
        program.prepare(folder)
        if program.script:
            header = f"#!/bin/bash\n#SBATCH --nodes={program.num_nodes} --ntasks-per-node=2\n"
            (folder / "job.sbatch").write_text(f"{header}{program.script}")
        start, error = time.monotonic(), ""
        self.hpctrain(folder, *SUBMIT, f"--checkpoints={program.checkpoints}", *program.submit)
        try:
            if scenario != "undisturbed":
                self.disturb(program, scenario, folder)
        except (RuntimeError, TimeoutError) as problem:
            error = str(problem)
        self.hpctrain(folder, "wait", f"--timeout={END_LIMIT_S}", "run")
        seconds = time.monotonic() - start
        status = json.loads(self.hpctrain(folder, "status", "--json", "run"))
        if not status["state"] in ("COMPLETED", "FAILED"):
            self.hpctrain(folder, "cancel", "run")
        left = run_processes(folder / "run")
        error += f" {len(left)} processes are left" if left else ""
        words = self.hpctrain(folder, "status", "run")
        return Outcome(
            program.name,
            scenario,
            status["state"],
            (status["attempt"] or 0) + 1,
            round(seconds),
            self.compare(program, scenario, folder),
            words,
            error,
        )

    def disturb(self, program: Program, scenario: str, folder: Path) -> None:
        deadline = time.monotonic() + REACH_LIMIT_S
        while not self.is_due(program, folder):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no checkpoint or step {program.disturb_at} after {REACH_LIMIT_S} s")
            time.sleep(0.2)
        if scenario == "preempted":
            urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
            subprocess.run([*urgent, "--wrap=sleep 2"], env={**os.environ, **self.box.env}, check=True)
        elif program.script:
            # The process that uses most CPU time is no launcher.
            pids = [process.pid for process in run_processes(folder / "run") if is_rank(process)]
            os.kill(max(pids, key=cpu_ticks), SIGNALS[scenario])
        else:
            faults = {"killed": "kill-rank", "hung": "stop-rank"}
            self.hpctrain(folder, "chaos", "run", f"--fault={faults[scenario]}", "--seed=3")

    def is_due(self, program: Program, folder: Path) -> bool:
        if not program.disturb_at:
            return next(folder.glob(program.checkpoints), None) is not None
        path = folder / "run/metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return any(json.loads(line).get("step", 0) >= program.disturb_at for line in lines[-3:])

    def compare(self, program: Program, scenario: str, folder: Path) -> str:
        tensors = load(program.result, folder)
        if tensors is None:
            return "none"
        reference = load(program.result, folder.parent / "undisturbed")
        if scenario == "undisturbed" or reference is None:
            return f"{tensors.numel()} numbers"
        if tensors.shape != reference.shape:
            return "other shape"
        difference = (tensors - reference).abs().max().item()
        return "identical" if difference == 0 else f"differs by {difference:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/conformance"))
    args = parser.parse_args()
    box = sandbox.find("programs")
    sources = os.environ.get("CONFORMANCE_SOURCES")
    driver = Driver(box, args.work, Path(sources) if sources else None)
    for program in PROGRAMS:
        if args.only.lower() in program.name.lower():
            for scenario in args.scenarios.split(","):
                outcome = driver.run(program, scenario)
                print(json.dumps(asdict(outcome) | {"status": None}), flush=True)
                print(outcome.status, flush=True)


if __name__ == "__main__":
    main()
