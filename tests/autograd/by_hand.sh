#!/bin/sh
# by_hand.sh PYTHON PROGRAM: two processes of it, which MASTER_ADDR and MASTER_PORT bring together.
set -eu
MASTER_PORT=$("$1" -c 'import socket
s = socket.socket()
s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])')
export MASTER_ADDR=127.0.0.1 MASTER_PORT WORLD_SIZE=2
RANK=1 "$2" &
other=$!
RANK=0 "$2"
wait "$other"
