"""What happened in a run, read back from spools: `sdcwatch report`, and the few lines at the end of every run.

facts.py    a job's spools and checkpoints as one record      chart.py   its steps as a picture
page.py     the record as one HTML file                       ending.py  a flat dict, and five lines of text
command.py  `sdcwatch report SPOOL... --output report.html`
"""
