#!/usr/bin/env python3
"""Includes point one way. Prints every line that breaks a rule below and exits 1 if there is one.

usage: tools/check_includes.py [ROOT]        check a tree (default: the repository this file is in)
       tools/check_includes.py --self-test   break each rule in a scratch tree and see that it is found
"""
import pathlib
import re
import sys
import tempfile

# Folder -> the folders of ours it may include from. Tests may include anything.
ALLOWED = {
    "kernels": {"kernels"},
    "comm": {"comm"},
    "configs": {"configs"},
    "coordinator": {"coordinator", "comm", "configs"},
    "worker": {"worker", "kernels", "comm", "configs"},
    "tests": {"tests", "kernels", "comm", "configs", "coordinator", "worker"},
}
# What a plan counts with: sizes and shapes from settings alone, of which the coordinator and the worker need the same.
SHARED = {"coordinator": ("worker/sizes/", "worker/model/hf_config.h", "worker/pipeline/chunk_grid.h")}
# The torch-free part of the worker: file formats, data and checkpoints can be used and tested without LibTorch.
TORCH_FREE = ("worker/data/", "worker/checkpoint/", "worker/pages/", "worker/sizes/", "worker/model/hf_config",
              "worker/pipeline/chunk_grid.h")
# (what, pattern of the included name, may this file include it?)
LIBRARIES = (
    ("torch headers stay in worker/, outside its torch-free part",
     re.compile(r"^(torch|ATen|c10|caffe2)/"),
     lambda path: path.startswith(("worker/", "tests/")) and not path.startswith(TORCH_FREE)),
    ("MPI stays in comm/ and worker/",
     re.compile(r"^mpi\.h$"),
     lambda path: path.startswith(("comm/", "worker/", "tests/")) and not path.startswith(TORCH_FREE)),
    ("UCX headers stay in comm/",
     re.compile(r"^uc[pst]/"),
     lambda path: path.startswith(("comm/", "tests/"))),
    ("CUDA headers stay in kernels/, comm/ and worker/",
     re.compile(r"^(cuda|cublas|cudnn|nccl|nvtx3/|cub/|thrust/)"),
     lambda path: path.startswith(("kernels/", "comm/", "worker/", "tests/")) and not path.startswith(TORCH_FREE)),
)
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def violations_of(path: str, text: str, exists) -> list:
    found = []
    folder = path.split("/")[0]
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, angled = match.groups()
        name = quoted or angled
        where = f"{path}:{number}: {line.strip()}"
        target = name.split("/")[0]
        if quoted and target not in ALLOWED:
            found.append(f"{where}: a quoted include starts at the repository's root; a library's is written <...>")
        elif quoted and not exists(quoted):
            found.append(f"{where}: there is no such file")
        elif angled and target in ALLOWED and exists(angled):
            found.append(f"{where}: our own headers are written \"...\"")
        elif quoted and target not in ALLOWED[folder] and not quoted.startswith(SHARED.get(folder, ("\0",))):
            found.append(f"{where}: {folder}/ includes only from {', '.join(sorted(ALLOWED[folder]))}")
        for what, pattern, may in LIBRARIES:
            if pattern.match(name) and not may(path):
                found.append(f"{where}: {what}")
    return found


def check(root: pathlib.Path) -> tuple:
    found, files = [], 0
    for folder in ALLOWED:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file():
                files += 1
                path = file.relative_to(root).as_posix()
                found += violations_of(path, file.read_text(errors="replace"), lambda name: (root / name).is_file())
    return found, files


def self_test() -> int:
    good = {
        "kernels/op.h": "#include <cstdint>\n#include <cuda_runtime.h>\n",
        "comm/link.h": "#include <mpi.h>\n",
        "configs/run.h": "#include <string>\n",
        "coordinator/main.cpp": '#include "comm/link.h"\n#include "configs/run.h"\n#include "coordinator/main.h"\n',
        "coordinator/main.h": "",
        "coordinator/plan.cpp": '#include "worker/sizes/sizes.h"\n',
        "worker/sizes/sizes.h": "#include <cstdint>\n",
        "worker/data/text.h": "#include <vector>\n",
        "worker/main.cpp": '#include <ATen/ATen.h>\n#include "kernels/op.h"\n#include "worker/data/text.h"\n',
        "tests/worker/all.cpp": '#include <torch/torch.h>\n#include "worker/data/text.h"\n',
    }
    bad = {
        "kernels/a.h": '#include "comm/link.h"\n',
        "kernels/b.cu": "#include <torch/torch.h>\n",
        "kernels/c.cpp": "#include <mpi.h>\n",
        "comm/a.h": '#include "configs/run.h"\n',
        "configs/a.h": '# include "kernels/op.h"\n',
        "configs/b.h": "#include <cuda_runtime.h>\n",
        "coordinator/a.cpp": '#include "worker/data/text.h"\n',
        "coordinator/b.cpp": "#include <c10/core/Device.h>\n",
        "coordinator/c.cpp": "#include <mpi.h>\n",
        "worker/a.cpp": '#include "coordinator/main.h"\n',
        "worker/data/a.cpp": "#include <ATen/ATen.h>\n",
        "worker/sizes/a.cpp": "#include <ATen/ATen.h>\n",
        "worker/b.cpp": '#include "kernels/none.h"\n',
        "worker/c.cpp": '#include "b.h"\n',
        "worker/d.cpp": "#include <kernels/op.h>\n",
        "worker/e.cpp": "#include <ucp/api/ucp.h>\n",
    }
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        for name, text in {**good, **bad}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        found, files = check(root)
    reported = {line.split(":")[0] for line in found}
    for name in sorted(set(bad) - reported):
        print(f"self-test: {name} breaks a rule and was not reported")
    for name in sorted(reported - set(bad)):
        print(f"self-test: {name} breaks no rule and was reported")
    assert files == len(good) + len(bad), files
    return 0 if reported == set(bad) else 1


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    if root.is_file():
        root = root.parent.parent
    found, files = check(root)
    for line in found:
        print(line)
    if files == 0:
        print(f"no source file of ours below {root}")
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
