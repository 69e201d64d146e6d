"""The fast read: which bank tokens a row reads, found on a GPU by Triton, and everything after that on those alone."""
