"""What the end-to-end tests share: a scratch folder with a tiny run in it, and the program `oomb` under watch.

Every process of a run carries a tag in its environment, so a test can tell whether one of them is still alive, whoever
its parent is by now. Only the standard library is used.
"""
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

PROGRAM = os.environ.get("OOMB_PROGRAM", "")
TAG = "OOMB_TEST_TAG"
SECONDS = 60  # longest that one run of a tiny model may take, on a loaded machine
METRIC_KEYS = {"step", "loss", "tokens", "tokens_per_second", "seconds", "grad_norm", "lr", "hbm_peak_bytes",
               "host_peak_bytes"}
# What a run that was refused may leave in its folder, beside what was there.
BOOKKEEPING = {".lock", "config.json", "worker.log"}

MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 257, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


def text_bytes(count, seed=7):
    """Text with something to learn in it, the same on every machine."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefghij") for _ in range(rng.randint(2, 7))) for _ in range(40)]
    out = ""
    while len(out) < count:
        out += rng.choice(words) + (" " if rng.random() < 0.9 else ".\n")
    return out[:count].encode()


@functools.lru_cache(maxsize=None)
def _crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


def crc32c(data, crc=0):
    """CRC-32C by its definition, for what the worker writes about its files and its tokens."""
    table, crc = _crc_table(), crc ^ 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc_of_ids(ids):
    return crc32c(struct.pack(f"<{len(ids)}q", *ids))


# ---- safetensors and token files -------------------------------------------------------------------------------------

def read_safetensors(path):
    """name -> (dtype, shape, bytes)"""
    raw = pathlib.Path(path).read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    header, body = json.loads(raw[8:8 + length]), raw[8 + length:]
    return {name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def write_safetensors(path, tensors):
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_llmc(path, ids):
    header = struct.pack("<256i", 20240520, 1, len(ids), *([0] * 253))
    pathlib.Path(path).write_bytes(header + struct.pack(f"<{len(ids)}H", *ids))


def write_npy(path, ids):
    header = "{'descr': '<i4', 'fortran_order': False, 'shape': (%d,), }" % len(ids)
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    pathlib.Path(path).write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() +
                                   struct.pack(f"<{len(ids)}i", *ids))


def write_megatron(stem, documents):
    lengths, starts, position = [], [], 0
    for ids in documents:
        lengths.append(len(ids))
        starts.append(position)
        position += 4 * len(ids)
    count = len(documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, count, count + 1)
    index += struct.pack(f"<{count}i", *lengths) + struct.pack(f"<{count}q", *starts)
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    pathlib.Path(f"{stem}.idx").write_bytes(index)
    flat = [token for ids in documents for token in ids]
    pathlib.Path(f"{stem}.bin").write_bytes(struct.pack(f"<{len(flat)}i", *flat))


# ---- processes -------------------------------------------------------------------------------------------------------

def _status_field(pid, key):
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return line.split()[1]
    return None


def tagged_processes(tag):
    """pid -> program name of all living processes that carry the tag; zombies do not count."""
    wanted, found = f"{TAG}={tag}".encode(), {}
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            if process_state(folder.name) not in (None, "Z", "X"):
                found[int(folder.name)] = _status_field(folder.name, "Name")
    return found


def process_state(pid):
    """The letter of /proc/PID/status, None when there is no such process."""
    return _status_field(pid, "State")


def wait_until(condition, seconds, pause=0.01):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def shared_memory():
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir("/dev/shm"))
    return set()


def held_open(name):
    """Whether a living process maps or holds this file of /dev/shm: then it is not a leftover, but somebody else's."""
    path = f"/dev/shm/{name}"
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if path in (folder / "maps").read_text():
                return True
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) == path for fd in (folder / "fd").iterdir()):
                return True
    return False


class Finished:
    def __init__(self, command, code, out, err):
        self.command, self.code, self.out, self.err = command, code, out, err

    def __str__(self):
        return f"{' '.join(self.command)}\nstatus {self.code}\nstdout:\n{self.out}stderr:\n{self.err}"


# ---- the test case ---------------------------------------------------------------------------------------------------

class CliTest(unittest.TestCase):
    """A scratch folder with model.json, text.txt and run.yaml; nothing outside it is written."""

    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomb-cli-"))
        self.launcher_may_leave_files = False  # mpirun, told to end twice, does not remove its session from TMPDIR
        self.tag = uuid.uuid4().hex
        self.shared_before = shared_memory()
        self.session_folder = self.folder / "tmp"  # where Open MPI puts its session
        self.session_folder.mkdir()
        self.addCleanup(self.clean_up)  # runs after a setUp that failed, too
        self.write_model("model.json")
        (self.folder / "text.txt").write_bytes(text_bytes(9001))
        self.write_run()

    def clean_up(self):
        try:
            self.expect_nothing_left()
        finally:
            for pid in tagged_processes(self.tag):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def expect_nothing_left(self):
        self.assertTrue(wait_until(lambda: not tagged_processes(self.tag), 15),
                        f"processes left: {tagged_processes(self.tag)}")
        if not self.launcher_may_leave_files:
            self.assertEqual(list(self.session_folder.rglob("*")), [], "session files left")

        def left_in_memory():
            return {name for name in shared_memory() - self.shared_before if not held_open(name)}
        self.assertTrue(wait_until(lambda: not left_in_memory(), 5), f"left in /dev/shm: {left_in_memory()}")

    # -- files of a run

    def write_model(self, name, **changes):
        model = {key: value for key, value in {**MODEL, **changes}.items() if value is not None}
        (self.folder / name).write_text(json.dumps(model))

    def write_run(self, name="run.yaml", **sections):
        """JSON is YAML. Sections are merged into those of the tiny run."""
        run = {
            "run": {"dir": "out"},
            "model": {"config": "model.json"},
            "data": {"paths": ["text.txt"]},
            "sequence": {"length": 61, "chunk": 16},
            "attention": {"kind": "topk", "page_tokens": 4, "budget_pages": 3},
            "train": {"steps": 4, "threads": 1, "learning_rate": 0.01, "device": "cpu"},
            "timeouts": {"connect_seconds": 50, "start_seconds": 50, "step_seconds": 50, "lost_seconds": 30,
                         "shutdown_seconds": 10},
        }
        for section, fields in sections.items():
            run[section] = {**run.get(section, {}), **fields}
        (self.folder / name).write_text(json.dumps(run, indent=1))

    def path(self, *parts):
        return self.folder.joinpath(*parts)

    # -- running

    def environment(self):
        return {**os.environ, TAG: self.tag, "TMPDIR": str(self.session_folder)}

    def start(self, *arguments, settings=(), **options):
        command = [PROGRAM, *arguments]
        for setting in settings:
            command += ["--set", setting]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                                **options)

    def finish(self, process, seconds=SECONDS):
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            self.fail(f"no end within {seconds} s: {Finished(process.args, process.returncode, out, err)}")
        return Finished(process.args, process.returncode, out, err)

    def oomb(self, *arguments, settings=()):
        return self.finish(self.start(*arguments, settings=settings))

    def train(self, *settings, run="run.yaml"):
        """A run that has to come to its good end."""
        result = self.oomb("train", run, settings=settings)
        self.assertEqual(result.code, 0, result)
        return result

    # -- what a run left

    def metrics(self, run="out"):
        """The lines of metrics.jsonl, checked: keys, and steps without gaps or duplicates."""
        lines = [json.loads(line) for line in self.path(run, "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            self.assertLessEqual(METRIC_KEYS, set(line), line)
        self.assertEqual([line["step"] for line in lines], list(range(1, len(lines) + 1)))
        return lines

    def losses(self, run="out"):
        """Losses as they were written: equal text is equal bits."""
        self.metrics(run)
        lines = self.path(run, "metrics.jsonl").read_text().splitlines()
        return [line.split('"loss":')[1].split(",")[0] for line in lines]

    def checkpoint(self, step, run="out"):
        return self.path(run, "checkpoints", f"step-{step:08d}")

    def checkpoint_steps(self, run="out"):
        folder = self.path(run, "checkpoints")
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        return [int(name[5:]) for name in names if ".tmp-" not in name]

    def expect_whole_checkpoint(self, folder):
        """As its marker says, by a second reader of it."""
        lines = (folder / "DONE").read_text().splitlines()
        self.assertEqual(lines[0], "oomb-checkpoint 1")
        self.assertEqual(lines[1], f"step {int(folder.name[5:])}")
        self.assertRegex(lines[-1], "^end [0-9a-f]{8}$")
        listed = {}
        for line in lines[2:-1]:
            word, crc, size, name = line.split(" ", 3)
            self.assertEqual(word, "file")
            listed[name] = (int(crc, 16), int(size))
        self.assertEqual(set(listed), {path.name for path in folder.iterdir()} - {"DONE"})
        self.assertLessEqual({"model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"}, set(listed))
        for name, (crc, size) in listed.items():
            data = (folder / name).read_bytes()
            self.assertEqual(len(data), size, name)
            self.assertEqual(crc32c(data), crc, name)

    def mark_whole(self, folder):
        """The marker anew, after a test has changed a file on purpose."""
        text = f"oomb-checkpoint 1\nstep {int(folder.name[5:])}\n"
        for path in sorted(folder.iterdir()):
            if path.name != "DONE":
                data = path.read_bytes()
                text += f"file {crc32c(data):08x} {len(data)} {path.name}\n"
        (folder / "DONE").write_text(text + f"end {crc32c(text.encode()):08x}\n")
        self.expect_whole_checkpoint(folder)

    def expect_equal_checkpoints(self, first, second):
        for name in ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"):
            self.assertEqual(hashlib.sha256((first / name).read_bytes()).hexdigest(),
                             hashlib.sha256((second / name).read_bytes()).hexdigest(),
                             f"{name} of {first} and {second}")

    def snapshot(self):
        """path -> content of everything in the scratch folder, but what any started run writes first."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if name.startswith("tmp/") or path.name in BOOKKEEPING:
                continue
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        return found

    def expect_one_line(self, result, *needles):
        """One line on stderr that says what, where and what would be right."""
        self.assertRegex(result.err, r"\Aerror: [^\n]+\n\Z", result)
        self.assertLess(len(result.err), 900, result)
        for unwanted in ("Exception", "terminate called", "internal", "frame #", "what()"):
            self.assertNotIn(unwanted, result.err)
        for needle in needles:
            self.assertIn(needle, result.err, result)

    def expect_refused(self, *needles, settings=(), command="train", run="run.yaml", code=2, started=True):
        """Refused with one line, and nothing of what was there is changed; `started`: the worker may have been."""
        before, run_folder = self.snapshot(), self.path("out").exists()
        result = self.oomb(command, run, settings=settings)
        self.assertEqual(result.code, code, result)
        self.expect_one_line(result, *needles)
        after = self.snapshot()
        if not run_folder and started:
            after.pop("out", None)
        self.assertEqual(after, before, result)
        return result


def main():
    if not PROGRAM:
        sys.exit("OOMB_PROGRAM must name the program oomb")
    unittest.main(verbosity=2)
