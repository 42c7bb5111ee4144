"""Datasets in the formats of other libraries, each read by the library's own reader: see docs/reference/data.md.

Each function returns a dataset for `run.loader(…)` and `ElasticLoader`. A library is imported when its function is
called, and not before.
"""

from everstep_sources.cache import Cache
from everstep_sources.errors import CacheError, CacheFull
from everstep_sources.files import Opener
from everstep_sources.lit import litdata
from everstep_sources.mosaic import mds
from everstep_sources.tar import tar_counts, webdataset

__all__ = ["Cache", "CacheError", "CacheFull", "Opener", "litdata", "mds", "tar_counts", "webdataset"]
