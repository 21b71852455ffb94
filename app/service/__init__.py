"""The one writer, and all that it puts together: pods and their states, batches of events, queries, dumps.

`IndexerService` (service.py) is its face: what changes the picture, and what asks it, calls that.
"""

from app.service.batches import BatchResult
from app.service.fuzzy_queries import FuzzyQuery, FuzzyResult
from app.service.queries import JsonAnswer, MatchQuery, MatchResult
from app.service.registry import PodListener
from app.service.scoring import MatchRow
from app.service.service import IndexerService, index_limits

__all__ = [
    "BatchResult",
    "FuzzyQuery",
    "FuzzyResult",
    "IndexerService",
    "JsonAnswer",
    "MatchQuery",
    "MatchResult",
    "MatchRow",
    "PodListener",
    "index_limits",
]
