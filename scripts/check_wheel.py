"""Fail unless the wheel given as argument holds the package ``durable_jobs`` alone, with its data files."""

import sys
import zipfile
from pathlib import Path

PACKAGE = "durable_jobs"
NEEDED = ("py.typed", "store/migrations/env.py")


def problems(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/", 1)[0] for name in names if ".dist-info/" not in name}
    found = [f"holds {top} beside {PACKAGE}" for top in sorted(tops - {PACKAGE})]
    found += [f"lacks {PACKAGE}/{path}" for path in NEEDED if f"{PACKAGE}/{path}" not in names]
    in_tree = {str(path) for path in Path(PACKAGE).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    found += [f"lacks {path}" for path in sorted(in_tree - set(names))]
    if not any(f"{PACKAGE}/store/migrations/versions/" in name and name.endswith(".py") for name in names):
        found.append("lacks the migrations")
    return found


if __name__ == "__main__":
    (path,) = map(Path, sys.argv[1:])
    if found := problems(path):
        sys.exit("\n".join(f"{path.name} {problem}" for problem in found))
    print(f"{path.name} holds {PACKAGE} alone")
