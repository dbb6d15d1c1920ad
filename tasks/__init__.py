"""One unit of work each, run by Prefect: a segment, and the page that shows its run. Uses torchrelay; never loads torch."""
