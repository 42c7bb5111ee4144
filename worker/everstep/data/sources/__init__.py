"""Datasets in the formats of other libraries, each read by the library's own reader: see docs/reference/data.md.

Each function returns a dataset for `run.loader(…)` and `ElasticLoader`. A library is imported when its function is
called, and not before.
"""

from everstep.data.sources.files import Opener
from everstep.data.sources.lit import litdata
from everstep.data.sources.mosaic import mds
from everstep.data.sources.tar import tar_counts, webdataset

__all__ = ["Opener", "litdata", "mds", "tar_counts", "webdataset"]
