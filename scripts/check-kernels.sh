#!/usr/bin/env bash
# Compiles every kernels/*.cu for sm_80 and sm_90 and holds what came out against kernels/resources.txt: fails where a
# kernel spills registers or uses local memory that it didn't, where an mma kernel has no tensor core instruction,
# where global loads or stores have become narrower, or where more registers leave room for fewer warps.
#
#   scripts/check-kernels.sh [FILE.cu...]            compare (these files alone)
#   scripts/check-kernels.sh --update [FILE.cu...]   write the table anew (the lines of these files' kernels alone)
#
# Needs what scripts/install-nvcc.sh installs; NVCC and CUOBJDUMP name other ones.
set -euo pipefail
cd "$(dirname "$0")/.."
export NVCC="${NVCC:-$PWD/.cuda/nvcc}" CUOBJDUMP="${CUOBJDUMP:-$PWD/.cuda/cuobjdump}"
for tool in "$NVCC" "$CUOBJDUMP"; do
    command -v "$tool" >/dev/null || { echo "no $tool; run scripts/install-nvcc.sh" >&2; exit 1; }
done
exec python3 - "$@" <<'END'
import concurrent.futures, glob, os, re, subprocess, sys, tempfile

TABLE, TARGETS = "kernels/resources.txt", ("sm_80", "sm_90")
COLUMNS = ("registers", "stack", "spilled", "mma", "load", "store")
NVCC, CUOBJDUMP = os.environ["NVCC"], os.environ["CUOBJDUMP"]


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compiler():
    return re.search(r"V[\d.]+", run(NVCC, "--version")).group()


def widest(sass, pattern):
    """Bits of the widest access."""
    suffixes = re.findall(pattern, sass)
    bits = {".128": 128, ".64": 64, ".U16": 16, ".S16": 16, ".U8": 8, ".S8": 8}
    widths = [next((bits[s] for s in bits if s + "." in suffix + "."), 32) for suffix in suffixes]
    return max(widths, default=0)


def measure(file, target):
    """What ptxas says about each kernel of a file, and what its code shows."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "cubin")
        said = run(NVCC, "-std=c++17", "-O3", "-cubin", f"-arch={target}", "-Xptxas", "-v", "-o", cubin, file)
        code = run(CUOBJDUMP, "-sass", cubin)
    sass = {part.split()[0]: part for part in code.split("Function : ")[1:]}
    rows = {}
    for part in re.split(r"Compiling entry function '", said)[1:]:
        name = part.split("'")[0]
        number = lambda pattern: int(re.search(pattern, part).group(1))
        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        rows[name, target] = {
            "registers": number(r"Used (\d+) registers"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spilled": spilled,
            "mma": int("HMMA" in sass[name]),
            "load": widest(sass[name], r"\bLDG(?:STS)?\b((?:\.\w+)*)"),
            "store": widest(sass[name], r"\bSTG((?:\.\w+)*)"),
        }
    return rows


def read():
    with open(TABLE) as file:
        lines = [line.split() for line in file if line.strip() and not line.startswith("#")]
    made_by, rows = lines[0][1], lines[2:]
    return made_by, {(row[0], row[1]): dict(zip(COLUMNS, map(int, row[2:]))) for row in rows}


def write(rows):
    width = max(len(kernel) for kernel, _ in rows) + 1
    line = lambda cells: f"{cells[0]:{width}} {cells[1]:6}" + "".join(f"{cell:>10}" for cell in cells[2:])
    with open(TABLE, "w") as file:
        file.write("# What each kernel takes, by scripts/check-kernels.sh --update: registers of a thread; "
                   "bytes of stack; bytes\n"
                   "# spilled (stored and loaded); whether it uses tensor cores; "
                   "bits of its widest global load and store.\n")
        file.write(f"nvcc {compiler()}\n")
        file.write(line(("kernel", "target", *COLUMNS)) + "\n")
        for kernel, target in sorted(rows):
            file.write(line((kernel, target, *rows[kernel, target].values())) + "\n")


def warps(registers):
    """Warps that a quarter of a multiprocessor, with 16384 registers, has room for."""
    return min(16, 16384 // (32 * -(-registers // 8) * 8))


def faults(key, now, before):
    kernel = key[0]
    if ("mma" in kernel or before and before["mma"]) and not now["mma"]:
        yield "uses no tensor cores"
    if before is None:
        yield f"isn't in {TABLE}; run scripts/check-kernels.sh --update"
        return
    for what in ("spilled", "stack"):
        if now[what] > before[what]:
            yield f"{what}: {now[what]} bytes, were {before[what]}"
    for what in ("load", "store"):
        if now[what] < before[what]:
            yield f"widest global {what}: {now[what]} bits, was {before[what]}"
    if warps(now["registers"]) < warps(before["registers"]):
        yield f"{now['registers']} registers, were {before['registers']}: fewer warps fit"


update, files = sys.argv[1:2] == ["--update"], [word for word in sys.argv[1:] if word != "--update"]
made_by, table = read() if os.path.exists(TABLE) else (compiler(), {})
if made_by != compiler() and (files or not update):
    sys.exit(f"{TABLE} is of nvcc {made_by}, but this is {compiler()}: scripts/install-nvcc.sh installs the right one")

rows = {}
sources = sorted(files or glob.glob("kernels/*.cu"), key=os.path.getsize, reverse=True)  # those that take longest first
jobs = [(file, target) for file in sources for target in TARGETS]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for part in pool.map(lambda job: measure(*job), jobs):
        rows.update(part)

if update:
    write({**table, **rows} if files else rows)
    print(f"{TABLE}: {len(rows)} lines; {sum(row['spilled'] > 0 for row in rows.values())} of them spill registers")
    sys.exit()
found = [f"{key[0]} for {key[1]}: {fault}" for key in sorted(rows) for fault in faults(key, rows[key], table.get(key))]
if not files:
    found += [f"{kernel} for {target}: in {TABLE}, but gone" for kernel, target in sorted(table.keys() - rows.keys())]
print("\n".join(found) if found else f"{len(rows)} lines as in {TABLE} or better")
sys.exit(bool(found))
END
