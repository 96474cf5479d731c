"""Why a run is slow: from what its ranks recorded to findings in plain words. Pure: tables in, findings out."""
