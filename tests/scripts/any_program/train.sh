#!/bin/sh
# The DDP loop in a shell script.
cd "$(dirname "$0")/.." && "$PYTHON" -m any_program.ddp
