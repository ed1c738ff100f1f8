"""Fuzzing of functions that search foreign output: logs, tracebacks, error messages, secrets."""

from fuzzing import Parser, parse_mapping, write_file

from hpctrain import files, text
from hpctrain.jobspec import redaction
from hpctrain.records import crash_output
from hpctrain.slurm import prepare_job_end
from hpctrain.supervisor.failures import root_cause
from hpctrain.supervisor.failures.root_cause import RankFailure
from hpctrain.supervisor.policy import history

TRACEBACK = """Traceback (most recent call last):
  File "/x/train.py", line 3, in <module>
    main()
  File "/usr/lib/python3/site-packages/torch/nn.py", line 9, in forward
    raise ValueError(x)

ValueError: the loss is bad
"""
COMMAND = "train.py --api-key abc --url https://user:pw@example.org/path?token=x 'password: \"a b\"'"
ERRORS = [
    "CUDA error: uncorrectable ECC error encountered",
    "NCCL communicator was aborted: timeout",
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus. nvlink error",
    "[Errno 28] No space left; can't allocate memory",
]


def classify_message(message: str) -> object:
    failure = RankFailure(0, "n1", "exception", "RuntimeError", message, "log", None, 0.0)
    return root_cause.classify(failure), root_cause.is_deterministic(failure)


PARSERS = [
    Parser(
        files.parse_json_object,
        ['{"step": 7, "ranks": [0, 1]}'],
        (ValueError,),
        lambda content: files.parse_json_object(content, "a message"),
    ),
    Parser(text.printable, [TRACEBACK]),
    Parser(text.without_escapes, ["\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\r"]),
    Parser(text.is_count, ["17"]),
    Parser(redaction.redact, [COMMAND]),
    Parser(redaction.strip_url_paths, ["https://hooks.example.org/a/b?c and http://u:p@h"]),
    Parser(redaction.is_secret, ["AWS_SECRET_KEY"]),
    Parser(redaction.redact_args, [COMMAND], call=lambda content: redaction.redact_args(content.split(" "))),
    Parser(
        redaction.redact_environment,
        [COMMAND],
        call=lambda content: redaction.redact_environment({"args": content}),
        most_bytes=1 << 14,
    ),
    Parser(
        redaction.redact_spec,
        ['{"env": {"TOKEN": "x"}, "args": ["--key", "y"], "notify": {"targets": ["https://h/x"]}}'],
        call=lambda content: redaction.redact_spec(parse_mapping(content)),
    ),
    Parser(crash_output.fold, [TRACEBACK]),
    Parser(crash_output.PEER_LOST.search, ["Connection closed by peer", "socket timeout"]),
    Parser(
        crash_output._newest_traceback,
        [TRACEBACK + "srun: error\n" + TRACEBACK],
        call=lambda content: crash_output._newest_traceback(write_file(content), 0),
    ),
    Parser(root_cause.classify, ERRORS, call=classify_message),
    Parser(
        root_cause.killed_tasks,
        [
            "srun: error: n1: task 0: Killed",
            "Root Cause (first observed failure):\n  host : n1\n  rank : 1 (x)\n  exitcode : -9 (pid: 7)",
        ],
        call=lambda content: root_cause.killed_tasks(write_file(content), 0),
    ),
    Parser(history.normalize_cause, ["rank 3 on n1: ValueError: at 0xdeadbeef"]),
    Parser(
        prepare_job_end._EVICTED.search,
        ["slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T11:02:09 DUE TO PREEMPTION ***"],
        slow=[("", "error: *** JOB 1", "\n")],
    ),
    Parser(
        prepare_job_end.find_requeue,
        ["slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T11:02:09 DUE TO JOB REQUEUE ***"],
        slow=[("", "error: *** JOB 1 AT 2", "\n")],
        call=lambda content: prepare_job_end.find_requeue(content, 0.0),
    ),
]
