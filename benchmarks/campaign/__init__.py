"""The detection campaign: thousands of injected faults and a hundred thousand clean comparisons, on real gloo ranks.

    cases.py      what is injected, and where               healthy.py    healthy but odd training loops
    pool.py       persistent ranks, one job at a time       simulated.py  the verdict function alone, up to 16,384 ranks
    training.py   one tiny run with one fault               peers.py      sdcguard on the same faults
    score.py      what came of each case                    guarantees.py what must hold; a miss is exit status 1
    journal.py    results on disk, so that it goes on       document.py   docs/detection.md and its picture

Run it with `make campaign`, or `python -m benchmarks.campaign --help`.
"""
