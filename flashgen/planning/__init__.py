"""Planning: candidates -> must fit -> ranked, and what a plan costs on a problem."""
