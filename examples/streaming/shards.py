"""Writes handwritten digits as tar files in webdataset's convention, and how many each holds: shards.py FOLDER"""

import io
import json
import sys
import tarfile
from pathlib import Path

from sklearn.datasets import load_digits

from everstep_sources import tar_counts

SHARDS, EACH = 12, 120  # 1,440 images


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as archive:
            for index in range(shard * EACH, (shard + 1) * EACH):
                files = {"pixels": images[index].astype("uint8").tobytes(), "label": str(labels[index]).encode()}
                for extension, content in files.items():
                    member = tarfile.TarInfo(f"{index:04}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    counts = tar_counts([str(file) for file in sorted(folder.glob("*.tar"))])
    (folder / "counts.json").write_text(json.dumps({Path(url).name: count for url, count in counts.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
