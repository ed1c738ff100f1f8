"""Every way of starting ranks that `detect` knows, as commands for the live tests and the recordings."""

from helpers.launch_runner import Launch

_OPENMPI = "mpirun.openmpi --allow-run-as-root --mca btl self,tcp"
_OPENMPI_PROBE = "PROBE libmpi.so.40"
_MPICH_PROBE = "PROBE libmpich.so.12"
_PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}: "}

#: Steps of srun, and processes of an allocation outside of any step.
SLURM = [
    Launch("srun-even", "srun -N4 -n8 --label PROBE"),
    Launch("srun-uneven", "srun -N3 -n11 -c2 --label PROBE"),  # 4(x2),3
    Launch("srun-one-task", "srun -n1 --label PROBE"),
    Launch("srun-cyclic", "srun -N3 -n8 --distribution=cyclic --label PROBE"),
    Launch(
        "srun-arbitrary",
        "printf '%s\\n' node2 node0 node2 node1 >FOLDER/hosts; "
        "SLURM_HOSTFILE=FOLDER/hosts srun -n4 --distribution=arbitrary --label PROBE",
        refused="SLURM_HOSTFILE",
    ),
    Launch("srun-gpus-per-task", "srun -N2 -n4 --gpus-per-task=1 --label PROBE"),
    Launch("srun-gpu-bind", "srun -N2 -n4 --gpus-per-node=2 --gpu-bind=map_gpu:1,0 --label PROBE"),
    Launch("srun-ntasks-per-gpu", "srun -n8 --gpus=4 --ntasks-per-gpu=2 --label PROBE"),
    Launch("srun-export-none", "srun -N2 -n3 --export=NONE --label PROBE"),
    Launch("srun-pmi2", f"srun -N2 -n3 --mpi=pmi2 {_MPICH_PROBE}", truth="mpi"),
    Launch(
        "srun-on-a-part-of-the-nodes",
        "salloc -Q -N4 -n8 --ntasks-per-node=2 srun -N2 -n3 --relative=1 --label PROBE",
    ),
    Launch("srun-in-salloc", "salloc -Q -N2 -n5 srun --label PROBE"),
    Launch("srun-in-sbatch", "sbatch -o FOLDER/%j.log -N2 -n4 --wrap 'srun --label PROBE'"),
    Launch(
        "srun-in-a-step",
        "salloc -Q -N2 -n6 srun -N2 -n2 "
        "sh -c 'test $SLURM_PROCID = 1 || exec srun --overlap -N2 -n3 --label PROBE'",
    ),
    Launch(
        "srun-in-an-interactive-shell",
        'script -qc "salloc -Q -N2 -n6 srun -n1 -N1 --pty '
        "bash -c 'srun --overlap -N2 -n3 --label PROBE'\" /dev/null",
    ),
    Launch("array", "sbatch -o FOLDER/%A_%a.log --array=3-4 -N2 -n3 --wrap 'srun --label PROBE'"),
    Launch("het-step", "srun -N1 -n2 --label PROBE : -N2 -n3 --label PROBE"),
    Launch("het-job", "salloc -Q -N1 -n2 : -N2 -n3 srun --het-group=0,1 --label PROBE"),
    Launch(
        "het-job-unsorted", "salloc -Q -w node2,node3 -n3 : -w node0 -n1 srun --het-group=0,1 --label PROBE"
    ),
    Launch("het-job-one-component", "salloc -Q -N1 -n2 : -N2 -n3 srun --het-group=1 --label PROBE"),
    Launch("batch-script", 'sbatch -o FOLDER/%j.log -N2 -n4 --wrap "PROBE"', truth="alone"),
    Launch("array-batch-script", 'sbatch -o FOLDER/%j.log --array=7 -n4 --wrap "PROBE"', truth="alone"),
    Launch("het-batch-script", 'sbatch -o FOLDER/%j.log -n2 : -n3 --wrap "PROBE"', truth="alone"),
    Launch("salloc-shell", "salloc -Q -N2 -n4 PROBE", truth="alone"),
    Launch(
        # With this option, salloc's shell runs in a special step on the first node.
        "salloc-interactive-step",
        "sed '1iLaunchParameters=use_interactive_step' $SLURM_CONF >FOLDER/slurm.conf; "
        "printf '#!/bin/sh\\nexec PROBE\\n' >FOLDER/shell; chmod +x FOLDER/shell; "
        "script -qc 'SLURM_CONF=FOLDER/slurm.conf SHELL=FOLDER/shell salloc -Q -N2 -n4' /dev/null",
        truth="alone",
    ),
    Launch(
        "interactive-shell-of-several-tasks",
        "printf 'test $SLURM_PROCID != 0 || PROBE\\n' >FOLDER/commands; "
        "script -qc 'srun -J bash -N2 -n2 --pty bash FOLDER/commands' /dev/null",
        truth="alone",
        refused="interactive bash",
    ),
]

#: Further launchers; those that reach several hosts without Slurm find emulated ones.
OTHERS = [
    Launch("nothing", "PROBE", truth="alone"),
    Launch("torchrun", "TORCHRUN --standalone --nproc-per-node 2 PROBE", truth="torchrun", env=_PREFIX),
    Launch(
        "torchrun-two-agents",
        "A='--nnodes 2 --master-addr 127.0.0.1 --master-port PORT'; "
        "TORCHRUN $A --node-rank 1 --nproc-per-node 1 PROBE & "
        "TORCHRUN $A --node-rank 0 --nproc-per-node 2 PROBE; wait",
        truth="torchrun",
        env=_PREFIX,
    ),
    Launch(
        "torchrun-under-srun",
        "srun -N2 --ntasks-per-node=1 sh -c 'exec TORCHRUN --nnodes 2 --node-rank $SLURM_NODEID "
        "--nproc-per-node 2 --master-addr 127.0.0.1 --master-port PORT PROBE'",
        truth="torchrun",
        env=_PREFIX,
    ),
    Launch(
        "torchrun-alone-in-each-task",
        "srun -N2 -n2 TORCHRUN --standalone --nproc-per-node 1 PROBE",
        truth="alone",
        env=_PREFIX,
        refused="inside process",
    ),
    Launch("openmpi", f"{_OPENMPI} --oversubscribe -n 3 {_OPENMPI_PROBE}", truth="mpi"),
    Launch(
        "openmpi-three-hosts",
        f"unshare --uts sh -c 'hostname ha; {_OPENMPI} --mca plm_rsh_agent PRETEND_SSH -H ha:2,hb:2,hc:1 "
        f"{_OPENMPI_PROBE}'",
        truth="mpi",
    ),
    Launch(
        "openmpi-told-the-nodes",
        f"unshare --uts sh -c 'hostname hx; {_OPENMPI} --mca plm_rsh_agent PRETEND_SSH -H ha:1,hb:1 "
        f"-n 1 -x MASTER_ADDR=ha -x GROUP_WORLD_SIZE=2 -x NODE_RANK=0 {_OPENMPI_PROBE} "
        f": -n 1 -x MASTER_ADDR=ha -x GROUP_WORLD_SIZE=2 -x NODE_RANK=1 {_OPENMPI_PROBE}'",
        truth="mpi",
    ),
    Launch("openmpi-in-salloc", f"salloc -Q -N3 -n5 {_OPENMPI} {_OPENMPI_PROBE}", truth="mpi"),
    Launch(
        "openmpi-in-sbatch-by-node",
        f"sbatch -o FOLDER/%j.log -N3 -n6 --wrap '{_OPENMPI} --map-by node -n 4 {_OPENMPI_PROBE}'",
        truth="mpi",
    ),
    Launch("mpich", f"mpiexec.mpich -n 3 {_MPICH_PROBE}", truth="mpi"),
    Launch(
        "mpich-two-hosts",
        "unshare --uts sh -c 'hostname node0; mpiexec.mpich -launcher ssh -launcher-exec PRETEND_SSH "
        f"-hosts node0:2,node1:1 -n 3 {_MPICH_PROBE}'",
        truth="mpi",
        refused="do not determine the rank of this node",
    ),
    Launch(
        "mpich-told-the-nodes",
        "unshare --uts sh -c 'hostname node0; mpiexec.mpich -launcher ssh -launcher-exec PRETEND_SSH "
        "-hosts node0:2,node1:1 -genv MASTER_ADDR node0 -genv GROUP_WORLD_SIZE 2 "
        f"-n 2 -env NODE_RANK 0 {_MPICH_PROBE} : -n 1 -env NODE_RANK 1 {_MPICH_PROBE}'",
        truth="mpi",
    ),
    Launch("mpich-in-salloc", f"salloc -Q -N3 -n5 mpiexec.mpich {_MPICH_PROBE}", truth="mpi"),
    Launch("submitit-local", "SUBMITIT local FOLDER"),
    Launch("submitit-slurm", "SUBMITIT slurm FOLDER"),
]

#: Launches that only `record_launches.py` starts: no Debian or test package provides them.
RECORDED_ONLY = [
    Launch("horovodrun", "HOROVODRUN --gloo -np 3 HOROVOD_PROBE FOLDER horovod", truth="horovod"),
    Launch(
        "horovodrun-two-hosts",
        "HOROVODRUN --gloo -np 4 -H localhost:2,127.0.0.1:2 HOROVOD_PROBE FOLDER horovod",
        truth="horovod",
        refused="MASTER_ADDR",
    ),
    Launch(
        "horovodrun-two-hosts-told-the-address",
        "HOROVODRUN --gloo -np 4 -H localhost:2,127.0.0.1:2 HOROVOD_PROBE FOLDER horovod",
        truth="horovod",
        env={"MASTER_ADDR": "localhost"},
    ),
    Launch(
        # A session with the batch script's variables, as an IDE or a notebook may have.
        "ssh-session-with-leftovers",
        "sbatch -o FOLDER/%j.log -N2 -n4 --wrap 'SSH -o SendEnv=SLURM* 127.0.0.1 PROBE'",
        truth="alone",
    ),
]

ALL = {launch.name: launch for launch in [*SLURM, *OTHERS, *RECORDED_ONLY]}
