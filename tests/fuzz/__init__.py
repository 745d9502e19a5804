"""Jobs drawn at random, each trained on its layout and on one rank: the curves must be the same.

    python -m tests.fuzz --n 500 --seed 1        # judge jobs 0 to 499 of that seed, write bench/results/fuzz.json
    python -m tests.fuzz --seed 1 --only 17      # one of them again

`draw` makes a job from (seed, index) alone, `judge` runs it. Most jobs are drawn to be legal and must be taken; some
are spoilt on purpose. For all of them one rule holds: a job is refused by `load_job`, with a ConfigError and before any
process starts, or it trains and agrees with one rank within the tolerance table. Anything else is a failure.
"""
