#!/usr/bin/env python3
"""Where the time of a traced step went: GPU time by kernel, idle gaps, and host ranges.

Usage: tools/trace_summary.py TRACE.json [ROWS]      (a trace written by `profile.step`)
"""
import collections
import json
import re
import sys


def short(name):
    """A kernel's name without its template arguments and parameters."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = re.sub(r"^void ", "", name)
    return re.split(r"[<(]", name)[0][-60:] if not name.startswith(("nvjet", "sm90", "cutlass")) else name[:60]


def union(spans):
    """Total length of the union of (start, end) spans, sorted by start."""
    busy, last = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    rows = int(sys.argv[2]) if len(sys.argv) == 3 else 25
    with open(sys.argv[1]) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    for title, group in (("GPU", device), ("host range", ranges)):
        if not group:
            continue
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in group)
        length = spans[-1][1] - spans[0][0]
        total, count = collections.Counter(), collections.Counter()
        for e in group:
            name = short(e["name"]) if group is device else e["name"]
            total[name] += e["dur"]
            count[name] += 1
        print(f"{title}: {length / 1e3:.1f} ms from first to last", end="")
        print(f", busy {100 * union(spans) / length:.1f} %" if group is device else "")
        for name, micros in total.most_common(rows):
            print(f"  {micros / 1e3:10.1f} ms {100 * micros / length:6.1f} %  x{count[name]:<7d} {name}")


if __name__ == "__main__":
    main()
