from __future__ import annotations

from hpctrain.jobs.environment import outer_environment, sbatch_environment


def test_a_job_around_the_submission_leaves_no_trace_but_the_cluster_does():
    environ = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "mask",
        "SQUEUE_FORMAT": "%i",
        "RANK": "3",
        "HPCTRAIN_RUN_DIR": "/other",
    }
    assert outer_environment(environ) == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}


def test_what_the_script_says_wins_over_variables_of_sbatch():
    environ = {
        "SBATCH_PARTITION": "old",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_ACCOUNT": "mine",
    }
    assert sbatch_environment(environ, ["partition", "time"]) == {"SBATCH_ACCOUNT": "mine"}
