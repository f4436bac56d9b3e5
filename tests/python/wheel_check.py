"""Installs a wheel into a fresh environment that has torch and nothing else of ours, and uses it.

    python tests/python/wheel_check.py build/wheels/torch_convoy-....whl

torch is that of the Python which runs this, seen through a .pth file: installing it again would only
test pip.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2]
LIMIT = 300
RANK = """
import torch, torch.distributed as dist
dist.init_process_group("convoy", "convoy://")
x = torch.ones(1000)
dist.all_reduce(x)
assert x.sum() == 2000
import convoy
assert convoy.__file__.startswith(FOLDER), convoy.__file__
print("rank", dist.get_rank(), "is content with", convoy.__version__)
dist.destroy_process_group()
"""
# torch knows the backend without an import of ours.
TORCH_RPC = """
import os, torch, torch.distributed.rpc as rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", backend=rpc.BackendType.CONVOY, rank=rank, world_size=2)
assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
rpc.shutdown()
print("rank", rank, "has called by torch.distributed.rpc")
"""
RPC = """
import torch, convoy.rpc
@convoy.rpc.function
def add(a: torch.Tensor, b: float) -> torch.Tensor:
    return a + b
with convoy.rpc.Session() as rpc:
    assert rpc.rpc_sync(1 - rpc.worker().rank, add, torch.ones(2), 1.0).tolist() == [2, 2]
    print("rank", rpc.worker().rank, "has called by convoy.rpc")
"""
FILES = ("convoy/rpc.py", "convoy/_torch_rpc.py", "_convoy/torch_rpc.py", "convoy/_C.pyi", "convoy/py.typed")
USER = """
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
find_package(convoy REQUIRED COMPONENTS core)
add_executable(user {source})
target_link_libraries(user PRIVATE convoy::core)
"""


def run(*command, **options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT,
                          env=environment | {"OMP_NUM_THREADS": "1"}, **options)
    if done.returncode:
        sys.exit(f"wheel_check: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main():
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="convoy-wheel.") as folder:
        folder = Path(folder).resolve()
        run(sys.executable, "-m", "venv", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        import torch

        # What was installed there as well must not be found first, nor at all.
        (packages / "torch_of_another.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)

        missing = [name for name in FILES if not (packages / name).exists()]
        if missing:
            sys.exit(f"wheel_check: {wheel.name} does not have {missing}")
        command = folder / "venv" / "bin" / "convoy"
        for number, program in enumerate((RANK, TORCH_RPC, RPC)):
            file = folder / f"program{number}.py"
            file.write_text(textwrap.dedent(program).replace("FOLDER", repr(str(packages))))
            print(run(command, "run", "-n", "2", python, file, cwd=folder), end="")
        run(command, "doctor", cwd=folder)

        # Somebody's C++ project against what is in it.
        (folder / "user").mkdir()
        (folder / "user" / "CMakeLists.txt").write_text(USER.format(source=SOURCES / "examples" / "meet.cpp"))
        run("cmake", "-S", folder / "user", "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={packages / 'convoy'}")
        run("cmake", "--build", folder / "build")
        print(run(command, "run", "-n", "2", folder / "build" / "user", cwd=folder), end="")
    print(f"{wheel.name} works in a fresh environment")


if __name__ == "__main__":
    main()
