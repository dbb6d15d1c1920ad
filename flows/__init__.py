"""Prefect flows. They only order tasks; loading one never loads torch."""
