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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpctrain import sandbox
from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

SCENARIOS = ("undisturbed", "preempted", "killed", "hung")
SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
#: Seconds for a run to save its first checkpoint, after which it is disturbed, and to end.
SAVE_LIMIT_S, END_LIMIT_S = 200, 400
ONE_RANK = ("--nodes=1", "--ntasks-per-node=1")
FOUR_RANKS = ("--nodes=2", "--ntasks-per-node=2")
BATCH_SCRIPT = "job.sbatch"


@dataclass(frozen=True)
class Program:
    name: str
    distribution: str
    #: Arguments of `submit`.
    submit: tuple[str, ...]
    #: Files that the program saves as checkpoints, and the file with its final state.
    checkpoints: str
    result: str
    #: Folder of CONFORMANCE_SOURCES, if the package does not contain the program.
    source: str = ""
    #: Writes data and models, because nothing is downloaded.
    prepare: Callable[[Path], None] = lambda _: None
    #: Lines of the shell script that the last argument of `submit` names.
    script: str = ""

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""


#: Programs that do not run on several ranks without GPUs.
NOT_ON_CPUS = {
    "torchvision references/classification": "calls torch.cuda.set_device if RANK or SLURM_PROCID is set",
    "torchtitan, debug model": "its device is cuda unless torch has another accelerator",
    "pytorch/examples minGPT-ddp, ddp, FSDP2": "print that they require two GPUs, and exit with code 0",
    "pytorch/examples imagenet": "does not wrap the model in DistributedDataParallel on CPUs",
    "PyTorch Geometric examples/multi_gpu": "call init_process_group('nccl')",
    "nanoGPT, timm, litgpt with several ranks": "select CUDA or pass device_ids; they run with one rank",
}


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
    (model / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc")
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
        features = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("int64")))
        return evaluate.MetricInfo(description="", citation="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references), "f1": 0.0}
"""

PROGRAMS = [
    Program(
        name="nanoGPT",
        distribution="nanoGPT",
        source="nanoGPT",
        prepare=write_tokens,
        submit=(BATCH_SCRIPT,),
        checkpoints="out/ckpt.pt",
        result="out/ckpt.pt",
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
    ),
    Program(
        name="Accelerate",
        distribution="accelerate",
        source="accelerate/examples",
        prepare=write_glue,
        submit=(
            *(*FOUR_RANKS, "--env=WANDB_MODE=offline", "complete_nlp_example.py", "--cpu", "--with_tracking"),
            *("--checkpointing_steps=10", "--output_dir=out"),
        ),
        checkpoints="out/step_*/model.safetensors",
        result="out/step_60/model.safetensors",
    ),
    Program(
        name="TRL",
        distribution="trl",
        prepare=write_text,
        submit=(*FOUR_RANKS, "--", "bash", "train.sh"),
        checkpoints="out/checkpoint-*/trainer_state.json",
        result="out/model.safetensors",
        script="latest=$(ls -d out/checkpoint-*/trainer_state.json 2>/dev/null | sort -V | tail -n 1)\n"
        "python -m trl.scripts.sft --model_name_or_path=model --dataset_name=text --use_cpu --bf16=false "
        "--gradient_checkpointing=false --output_dir=out --save_steps=10 --max_steps=60 --report_to=none "
        "--per_device_train_batch_size=1 --max_length=32 --logging_steps=10 "
        "${latest:+--resume_from_checkpoint=${latest%/*}}\n",
    ),
    Program(
        name="timm",
        distribution="timm",
        source="pytorch-image-models",
        prepare=write_images,
        submit=(BATCH_SCRIPT,),
        checkpoints="out/run/last.pth.tar",
        result="out/run/last.pth.tar",
        script="[ -e out/run/last.pth.tar ] && resume='--resume out/run/last.pth.tar'\n"
        "python train.py --data-dir=images --device=cpu --model=resnet10t --num-classes=2 --img-size=32 -b=8 "
        "--epochs=4 --workers=1 --output=out --experiment=run --checkpoint-hist=2 --log-interval=8 $resume\n",
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


def is_python(process: ProcessInfo) -> bool:
    """True for Python processes that a batch script starts."""
    return ATTEMPT_VARIABLE in process.environ and Path(process.argv[0]).name.startswith("python")


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


class Driver:
    """Runs programs in copies of their folders."""

    def __init__(self, box: sandbox.Sandbox, work: Path, sources: Path | None) -> None:
        self.work, self.sources = work, sources
        path = f"{Path(sys.executable).parent}:{box.env.get('PATH', os.environ['PATH'])}"
        self.env = {**os.environ, **box.env, "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def reason_to_skip(self, program: Program) -> str | None:
        if program.source and (self.sources is None or not (self.sources / program.source).is_dir()):
            return f"CONFORMANCE_SOURCES contains no {program.source}"
        return None if program.version or program.source else f"{program.distribution} is not installed"

    def run(self, program: Program, scenario: str) -> dict[str, Any]:
        folder = self.work / program.name.replace(" ", "-") / scenario
        self.copy(program, folder)
        started_at = time.monotonic()
        options = ("--run-dir=run", "--hang-timeout=10", f"--checkpoints={program.checkpoints}")
        self.hpctrain(folder, "submit", *options, *program.submit)
        problem = None if scenario == "undisturbed" else self.disturb(program, scenario, folder)
        self.hpctrain(folder, "wait", f"--timeout={END_LIMIT_S}", "run")
        seconds = round(time.monotonic() - started_at)
        status = json.loads(self.hpctrain(folder, "status", "--json", "run"))
        words = self.hpctrain(folder, "status", "run")
        if status["state"] not in ("COMPLETED", "FAILED"):
            problem = f"still {status['state']} after {END_LIMIT_S} s"
            self.hpctrain(folder, "cancel", "run")
        elif left := run_processes(folder / "run"):
            problem = f"{len(left)} processes are left"
        facts = {"state": status["state"], "attempts": (status["attempt"] or 0) + 1, "seconds": seconds}
        result = self.compare(program.result, folder)
        return {
            **facts,
            "result": result,
            "resumed": has_resumed(folder),
            "problem": problem,
            "status": words,
        }

    def copy(self, program: Program, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        prepared = folder.parent / "prepared"
        if not prepared.exists():
            if program.source and self.sources is not None:
                ignore = shutil.ignore_patterns(".git")
                shutil.copytree(self.sources / program.source, prepared, ignore=ignore)
            prepared.mkdir(parents=True, exist_ok=True)
            program.prepare(prepared)
        shutil.copytree(prepared, folder)
        if program.script:
            header = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=1\n"
            (folder / program.submit[-1]).write_text(f"{header}{program.script}")

    def hpctrain(self, folder: Path, *args: str) -> str:
        command = [sys.executable, "-m", "hpctrain", *args]
        output = {"capture_output": True, "text": True, "timeout": END_LIMIT_S + 60}
        result = subprocess.run(command, cwd=folder, env=self.env, **output)
        if result.returncode and args[0] != "wait":
            raise RuntimeError(f"{args}: {result.stdout}{result.stderr}")
        return result.stdout

    def disturb(self, program: Program, scenario: str, folder: Path) -> str | None:
        """Disturb a run after its first checkpoint; return the reason if it was not."""
        deadline = time.monotonic() + SAVE_LIMIT_S
        while not any(folder.glob(program.checkpoints)):
            if time.monotonic() > deadline:
                return f"no checkpoint after {SAVE_LIMIT_S} s"
            time.sleep(0.2)
        if scenario == "preempted":
            urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
            subprocess.run([*urgent, "--wrap=sleep 2"], env=self.env, check=True)
        elif program.submit[-1] == BATCH_SCRIPT:
            # Of the Python processes of the script, launchers use less CPU time.
            pids = [process.pid for process in run_processes(folder / "run") if is_python(process)]
            os.kill(max(pids, key=cpu_ticks), SIGNALS[scenario])
        else:
            fault = {"killed": "kill-rank", "hung": "stop-rank"}[scenario]
            self.hpctrain(folder, "chaos", "run", f"--fault={fault}", "--seed=3")
        return None

    def compare(self, pattern: str, folder: Path) -> str:
        tensors, reference = (load(pattern, path) for path in (folder, folder.parent / "undisturbed"))
        if tensors is None or reference is None or tensors.shape != reference.shape:
            return "none" if tensors is None else "not comparable"
        if tensors.allclose(reference, rtol=0, atol=0, equal_nan=True):
            return "identical"
        return f"differs by {(tensors - reference).abs().nan_to_num().max().item():.2g}"


def has_resumed(folder: Path) -> bool:
    """True if the last attempt loaded the state of an earlier one."""
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    return any(event["kind"] == "resumed" and event["attempt"] for event in events)


def describe(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Summarize how a program resumes."""
    disturbed = [outcome for name, outcome in outcomes.items() if name != "undisturbed"]
    if all(outcome["result"] == "identical" for outcome in disturbed):
        return "exactly" if all(outcome["resumed"] for outcome in disturbed) else "starts over, same result"
    return "from its own checkpoint" if all(outcome["resumed"] for outcome in disturbed) else "starts over"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the name of a program")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--box", default="conformance", help="name of the sandbox")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    box = sandbox.up(args.box, nodes=2, gpus_per_node=0)
    sources = os.environ.get("CONFORMANCE_SOURCES")
    work = Path(tempfile.gettempdir()) / "conformance"
    driver = Driver(box, work, Path(sources) if sources else None)
    rows = [{"name": name, "skipped": reason} for name, reason in NOT_ON_CPUS.items()]
    for program in PROGRAMS:
        if args.only.lower() not in program.name.lower():
            continue
        if reason := driver.reason_to_skip(program):
            rows.append({"name": program.name, "skipped": reason})
            continue
        outcomes = {}
        for scenario in args.scenarios.split(","):
            outcomes[scenario] = driver.run(program, scenario)
            print(program.name, scenario, json.dumps(outcomes[scenario]), flush=True)
        row = {"name": program.name, "version": program.version, "resumes": describe(outcomes)}
        rows.append({**row, "scenarios": outcomes})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
