"""What surrounds the flows where Prefect operates them, by purpose.

Of a run itself: `retries` and `approval`; `owner` tells which process it belongs to; `artifacts` is what Prefect's
pages show of it, `log` what its log says, `reports` what it leaves in the home. From outside: `runs` finds runs and
acts on them, `summary` is their page for CI, `exporter` the numbers for Prometheus. The server: `server` keeps one on
this machine, `api` talks to whichever it is, `setup` and `notify` register with it what finds dead runs, and who is
told.
"""
