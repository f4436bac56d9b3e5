#!/usr/bin/env python3
"""Checks that every file includes only its own layer and those below it.

    tools/check_layers.py [--root DIR]

A folder of src/ is a layer; a public header (include/convoy/x.h) belongs to one. Also checked: no
torch header below the layer `tensor`, public headers include only public headers, every source file
and every public header is in a CMake list. Prints one line for each violation; exit code 1 if any.
"""
import argparse
import re
import sys
from pathlib import Path

CORE = ["base", "os", "store", "transport", "coll", "agent", "rref"]  # no torch header in these, nor in launch
BELOW_GROUPS = CORE + ["tensor"]
GROUPS = BELOW_GROUPS + ["group", "share"]

# What each layer may include besides itself. Layers side by side do not know each other.
MAY_INCLUDE = {
    "base": [],
    "os": ["base"],
    "store": ["base", "os"],
    "transport": ["base", "os"],
    "coll": ["base", "os", "store", "transport"],
    "agent": ["base", "os", "store", "transport"],
    "rref": ["base", "os", "store", "transport", "agent"],
    "mpi": CORE,
    "tensor": CORE,
    "group": BELOW_GROUPS + ["mpi"],
    "share": BELOW_GROUPS,
    "ddp": GROUPS,
    "rpc": GROUPS,
    # ddp declares the interface through which a distributed backward reaches it; autograd
    # implements it.
    "autograd": GROUPS + ["rpc", "ddp"],
    "optim": GROUPS + ["rpc", "ddp", "autograd"],
    "pipeline": GROUPS + ["rpc", "autograd"],
    "launch": ["base", "os", "store"],
}
TORCH_FREE = CORE + ["mpi", "launch"]

# Public header -> its layer. "all" is the header that includes the others: for users only.
PUBLIC_HEADERS = {
    "call_site.h": "base",
    "deadline.h": "base",
    "event.h": "base",
    "reduce_op.h": "base",
    "error.h": "base",
    "version.h": "base",
    "flight.h": "os",
    "store.h": "store",
    "allocator.h": "tensor",
    "fwd.h": "tensor",
    "backend.h": "group",
    "c10d_store.h": "group",
    "group.h": "group",
    "group_batch.h": "group",
    "group_options.h": "group",
    "hooks.h": "ddp",
    "init.h": "group",
    "mpi.h": "group",
    "nn.h": "group",
    "rendezvous.h": "group",
    "window.h": "group",
    "work.h": "group",
    "share.h": "share",
    "process_pool.h": "share",
    "published.h": "share",
    "queue.h": "share",
    "slots.h": "share",
    "fields.h": "share",
    "functions.h": "share",
    "spawn.h": "share",
    "values.h": "share",
    "ddp.h": "ddp",
    "ddp_core.h": "ddp",
    "ddp_options.h": "ddp",
    "grad_bucket.h": "ddp",
    "ddp_stats.h": "ddp",
    "join.h": "ddp",
    "sync_batch_norm.h": "ddp",
    "tensors_in.h": "tensor",
    "reducer.h": "ddp",
    "averager.h": "ddp",
    "mixed_precision.h": "ddp",
    "sharded_optimizer.h": "optim",
    "elastic.h": "ddp",
    "optimizer_in_backward.h": "optim",
    "optimizer_rules.h": "optim",
    "rpc_error.h": "agent",
    "future.h": "rpc",
    "rpc.h": "rpc",
    "rpc_function.h": "rpc",
    "rpc_dynamic.h": "rpc",
    "rpc_operator.h": "rpc",
    "rpc_options.h": "rpc",
    "rpc_stats.h": "rpc",
    "remote_module.h": "rpc",
    "rref.h": "rpc",
    "detail/future_core.h": "rpc",
    "detail/future_then.h": "rpc",
    "detail/rpc_call.h": "rpc",
    "detail/rpc_message.h": "rpc",
    "detail/rpc_served.h": "rpc",
    "detail/rpc_serving.h": "rpc",
    "detail/rpc_shape.h": "rpc",
    "detail/rpc_signature.h": "rpc",
    "detail/rpc_values.h": "rpc",
    "detail/rpc_writer.h": "rpc",
    "autograd.h": "autograd",
    "detail/torch_pass.h": "autograd",
    "distributed_optimizer.h": "optim",
    "optim.h": "optim",
    "pipeline.h": "pipeline",
    "convoy.h": "all",
}
# These use convoy as its users do.
PUBLIC_ONLY = ["examples", "python"]

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|fmt|pybind11)/")
SOURCES = {".cpp", ".cc", ".c", ".cu"}
HEADERS = {".h", ".hpp", ".inc"}


def files_below(folder, suffixes):
    return sorted(p for p in folder.rglob("*") if p.suffix in suffixes) if folder.is_dir() else []


def includes(path):
    """(line number, quote, target) of each include."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for match in INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start(2)) + 1, match[1], match[2]


class Checker:
    def __init__(self, root):
        self.root = Path(root)
        self.problems = []

    def problem(self, path, line, text):
        place = path.relative_to(self.root).as_posix()
        self.problems.append(f"{place}:{line}: {text}" if line else f"{place}: {text}")

    def layer_of(self, target):
        """(layer, is public) of what an include names; None if it is not of this project. The layer
        of a public header without an entry is None: check_public_headers reports it."""
        folder, _, rest = target.partition("/")
        if folder == "convoy" and rest:
            return PUBLIC_HEADERS.get(rest), True
        return (folder, False) if folder in MAY_INCLUDE and rest else None

    def check_include(self, path, layer, line, quote, target):
        if layer in TORCH_FREE and TORCH.match(target):
            self.problem(path, line, f"layer {layer} is torch-free and includes {target}")
        if TORCH.match(target):
            return
        found = self.layer_of(target)
        if found is None:
            if quote == '"' and not self.is_generated(target):
                self.problem(path, line, f'"{target}" names no layer; write the path from src/, or <> for a system header')
            return
        other = found[0]
        if other is not None and other != layer and other not in MAY_INCLUDE[layer]:
            allowed = ", ".join(MAY_INCLUDE[layer]) or "nothing"
            self.problem(path, line, f"layer {layer} includes {target} of layer {other}; besides itself it may include {allowed}")

    def is_generated(self, target):
        return (self.root / "src" / (target + ".in")).exists()

    def check_sources(self):
        for folder in sorted(p for p in (self.root / "src").iterdir() if p.is_dir()):
            if folder.name not in MAY_INCLUDE:
                self.problem(folder, 0, "unknown layer; put it into MAY_INCLUDE of tools/check_layers.py")
                continue
            for path in files_below(folder, SOURCES | HEADERS):
                for include in includes(path):
                    self.check_include(path, folder.name, *include)

    def check_public_headers(self):
        folder = self.root / "include" / "convoy"
        for path in files_below(folder, HEADERS | {".in"}):
            layer = PUBLIC_HEADERS.get(path.relative_to(folder).as_posix().removesuffix(".in"))
            if layer is None:
                self.problem(path, 0, "unknown public header; put it into PUBLIC_HEADERS of tools/check_layers.py")
                continue
            for line, quote, target in includes(path):
                found = self.layer_of(target)
                if found and not found[1]:
                    self.problem(path, line, f"a public header includes {target}, which is not installed")
                elif layer != "all":
                    self.check_include(path, layer, line, quote, target)

    def check_users(self):
        for name in PUBLIC_ONLY:
            for path in files_below(self.root / name, SOURCES | HEADERS):
                for line, _, target in includes(path):
                    found = self.layer_of(target)
                    if found and not found[1]:
                        self.problem(path, line, f"{name} uses public headers only, not {target}")

    def check_listed(self):
        """Every source file stands in the CMakeLists.txt of its folder or of one above."""
        for name in ["src", "tests", "bench", "examples", "python"]:
            for path in files_below(self.root / name, SOURCES):
                if not self.is_listed(path):
                    self.problem(path, 0, "in no CMakeLists.txt: it is not compiled")
        lists = (self.root / "src").rglob("CMakeLists.txt")
        text = "\n".join(p.read_text(encoding="utf-8") for p in lists)
        for path in files_below(self.root / "include" / "convoy", HEADERS):
            if not re.search(rf"(^|[\s(/]){re.escape(path.name)}($|[\s)])", cmake_words(text)):
                self.problem(path, 0, "in no convoy_public_headers(): it is not installed")

    def is_listed(self, path):
        for folder in path.parents:
            lists = folder / "CMakeLists.txt"
            if lists.exists():
                name = path.relative_to(folder).as_posix()
                text = cmake_words(lists.read_text(encoding="utf-8"))
                if re.search(rf"(^|[\s(/]){re.escape(name)}($|[\s)])", text):
                    return True
            if folder == self.root:
                return False
        return False

    def run(self):
        self.check_sources()
        self.check_public_headers()
        self.check_users()
        self.check_listed()
        return self.problems


def cmake_words(text):
    """Without comments, with foreach() written out."""

    def write_out(match):
        return "\n".join(match[3].replace("${" + match[1] + "}", item) for item in match[2].split())

    text = re.sub(r"#.*", "", text)
    return re.sub(r"\bforeach\s*\(\s*(\w+)\s([^)]*)\)(.*?)\bendforeach\b", write_out, text, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=Path(__file__).resolve().parent.parent, type=Path)
    root = parser.parse_args().root.resolve()
    if not (root / "src").is_dir():
        parser.error(f"{root} has no folder src")
    problems = Checker(root).run()
    for problem in problems:
        print(problem)
    if problems:
        print(f"check_layers: {len(problems)} violation{'s' * (len(problems) > 1)}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
