"""The program of every rank of a launch: `record_rank.py FOLDER [LIBRARY]`.

It writes its variables into FOLDER and prints its pid. With a LIBRARY (`libmpi.so.40`, `libmpich.so.12` or
`horovod`), it also writes the rank that the library reports: the true rank.
"""

import ctypes
import json
import os
import sys
from pathlib import Path


def mpi_ranks(library: str) -> dict[str, int]:
    mpi = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    # mpi.h: MPICH's handles are numbers, Open MPI's are addresses.
    world = (
        ctypes.c_int(0x44000000)
        if "mpich" in library
        else ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
    )
    rank, size = ctypes.c_int(), ctypes.c_int()
    errors = [mpi.MPI_Init(None, None), mpi.MPI_Comm_rank(world, ctypes.byref(rank))]
    errors += [mpi.MPI_Comm_size(world, ctypes.byref(size)), mpi.MPI_Finalize()]
    if any(errors):
        sys.exit(f"{library}: errors {errors}")
    return {"rank": rank.value, "world_size": size.value}


def horovod_ranks() -> dict[str, int]:
    import horovod.torch as hvd

    hvd.init()
    ranks = {"rank": hvd.rank(), "world_size": hvd.size()}
    return ranks | {"local_rank": hvd.local_rank(), "local_world_size": hvd.local_size()}


def main(argv: list[str]) -> None:
    """Write the file, then print the pid: a label on the output identifies the process."""
    variables = dict(os.environ)
    library = argv[1] if len(argv) > 1 else None
    reported = horovod_ranks() if library == "horovod" else mpi_ranks(library) if library else {}
    record = {"pid": os.getpid(), "parent": os.getppid(), "told": reported, "variables": variables}
    Path(argv[0], f"{os.getpid()}.json").write_text(json.dumps(record), encoding="utf-8")
    print(os.getpid(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
