"""Makes the model importable by its tests: tests/ holds no packages, so its folder goes on the path here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
