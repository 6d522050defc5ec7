"""Every place of the injector, and `kill -9`, with heal and with halt: do the final weights equal a clean run's?

    cases.py      what is lived through                     life.py       one rank's training, from resume to end
    lived.py      one case, life after life, and judged     traps.py      SIGKILL inside a check, heal, write or halt
    ranks.py      real gloo ranks, forked, bounded in time  document.py   the tables in docs/healing.md

Run it with `make campaign-heal`, or `python -m benchmarks.heal --help`. It reads and breaks nothing outside of its own
folders and processes.
"""
