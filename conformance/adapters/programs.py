"""List public programs that run unchanged under hpctrain, and write what they would download.

Data and models are small and without content.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Ways in which a program continues after a disturbance.
EXACTLY, OWN_CHECKPOINT, STARTS_OVER = "exactly", "from its own checkpoint", "from the beginning"
ONE_RANK = ("--nodes=1", "--ntasks-per-node=1")
FOUR_RANKS = ("--nodes=2", "--ntasks-per-node=2")
BATCH_SCRIPT = "job.sbatch"
#: Finds modules in `src`, and hpctrain itself.
SOURCE_OPTION = f"--env=PYTHONPATH=src:{Path(__file__).resolve().parents[2]}"


@dataclass(frozen=True)
class Program:
    name: str
    #: The package with the program, or the folder of CONFORMANCE_SOURCES with it.
    source: str
    #: Arguments of `submit`.
    submit: tuple[str, ...]
    #: Files that the program saves as checkpoints, and the file with its final state.
    checkpoints: str
    result: str
    resumes: str
    #: Writes data and models, because nothing is downloaded.
    prepare: Callable[[Path], None] = lambda _: None
    #: Lines of the shell script that the last argument of `submit` names.
    script: str = ""


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
        path = folder / f"images/{'train' if index < 128 else 'val'}/class{index % 5}/{index}.png"
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
    for name in ("text", "data"):
        (folder / name).mkdir()
    chance = random.Random(0)
    texts = ["".join(chance.choices(letters, k=40)) for _ in range(512)]
    (folder / "data/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
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
        source="nanoGPT",
        prepare=write_tokens,
        submit=(BATCH_SCRIPT,),
        checkpoints="out/ckpt.pt",
        result="out/ckpt.pt",
        resumes=OWN_CHECKPOINT,
        script="[ -e out/ckpt.pt ] && init_from=resume || init_from=scratch\n"
        "python train.py --init_from=$init_from --dataset=noise --device=cpu --compile=False --dtype=float32 "
        "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=4 "
        "--max_iters=120 --lr_decay_iters=120 --eval_interval=20 --eval_iters=2 --log_interval=20\n",
    ),
    Program(
        name="Lightning CLI",
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
        resumes=EXACTLY,
    ),
    Program(
        name="Accelerate",
        source="accelerate/examples",
        prepare=write_glue,
        submit=(
            *(*FOUR_RANKS, "--env=WANDB_MODE=offline", "complete_nlp_example.py", "--cpu", "--with_tracking"),
            *("--checkpointing_steps=10", "--output_dir=out"),
        ),
        checkpoints="out/step_*/model.safetensors",
        result="out/step_60/model.safetensors",
        resumes=STARTS_OVER,
    ),
    Program(
        name="TRL",
        source="trl",
        prepare=write_text,
        submit=(*FOUR_RANKS, "--", "bash", "train.sh"),
        checkpoints="out/checkpoint-*/trainer_state.json",
        result="out/model.safetensors",
        resumes=EXACTLY,
        script="latest=$(ls -d out/checkpoint-*/trainer_state.json 2>/dev/null | sort -V | tail -n 1)\n"
        "python -m trl.scripts.sft --model_name_or_path=model --dataset_name=data --use_cpu --bf16=false "
        "--gradient_checkpointing=false --output_dir=out --save_steps=20 --max_steps=200 --report_to=none "
        "--per_device_train_batch_size=1 --max_length=32 --logging_steps=10 "
        "${latest:+--resume_from_checkpoint=${latest%/*}}\n",
    ),
    Program(
        name="run_clm",
        source="transformers/examples/pytorch/language-modeling",
        prepare=write_text,
        submit=(*FOUR_RANKS, "--", "bash", "train.sh"),
        checkpoints="out/checkpoint-*/trainer_state.json",
        result="out/model.safetensors",
        resumes=EXACTLY,
        script="latest=$(ls -d out/checkpoint-*/trainer_state.json 2>/dev/null | sort -V | tail -n 1)\n"
        "python run_clm.py --config_name=model --tokenizer_name=model --train_file=text/0.txt --do_train "
        "--validation_file=text/1.txt --use_cpu --output_dir=out --save_steps=20 --max_steps=400 "
        "--report_to=none --block_size=64 --per_device_train_batch_size=1 "
        "${latest:+--resume_from_checkpoint=${latest%/*}}\n",
    ),
    Program(
        name="torchvision classification",
        source="vision/references/classification",
        prepare=write_images,
        submit=(BATCH_SCRIPT,),
        checkpoints="out/checkpoint.pth",
        result="out/checkpoint.pth",
        resumes=OWN_CHECKPOINT,
        # With the variable, it expects a GPU. Without it, it trains in one process.
        script="unset SLURM_PROCID\n"
        "export TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1\n"
        "[ -e out/checkpoint.pth ] && resume='--resume=out/checkpoint.pth'\n"
        "python train.py --data-path=images --device=cpu --model=squeezenet1_1 --batch-size=16 --workers=1 "
        "--epochs=30 --val-resize-size=64 --val-crop-size=64 --train-crop-size=64 --output-dir=out $resume\n",
    ),
    Program(
        name="timm",
        source="pytorch-image-models",
        prepare=write_images,
        submit=(BATCH_SCRIPT,),
        checkpoints="out/run/last.pth.tar",
        result="out/run/last.pth.tar",
        resumes=OWN_CHECKPOINT,
        script="[ -e out/run/last.pth.tar ] && resume='--resume out/run/last.pth.tar'\n"
        "python train.py --data-dir=images --device=cpu --model=resnet10t --num-classes=5 --img-size=32 -b=8 "
        "--epochs=15 --workers=1 --output=out --experiment=run --checkpoint-hist=2 --log-interval=8 "
        "$resume\n",
    ),
    Program(
        name="open_clip",
        source="open_clip",
        prepare=write_clip,
        submit=(
            *(*FOUR_RANKS, SOURCE_OPTION, "-m", "open_clip_train.main", "--dataset-type=synthetic"),
            *("--train-num-samples=256", "--batch-size=8", "--epochs=8", "--workers=0", "--device=cpu"),
            *("--model=local-dir:model", "--precision=fp32", "--fsdp", "--logs=logs", "--name=run"),
            *("--resume=latest", "--save-most-recent"),
        ),
        checkpoints="logs/run/checkpoints/*.pt",
        result="logs/run/checkpoints/epoch_8.pt",
        resumes=EXACTLY,
    ),
    Program(
        name="litgpt",
        source="litgpt",
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
        resumes=EXACTLY,
    ),
]

#: Programs that do not run here, by reason. On several CPU ranks, torchtitan calls torch.cuda.set_device,
#: PyTorch Geometric calls init_process_group("nccl"), and pytorch/examples trains without DDP.
NOT_RUN = {
    "need GPUs": "torchtitan, minGPT-ddp, pytorch/examples imagenet, PyTorch Geometric multi_gpu",
    "downloads its data": "DeepSpeed's CIFAR-10 example",
}
