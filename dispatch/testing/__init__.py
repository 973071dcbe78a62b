"""The conformance kit: every claim of a backend against the oracle, and every refusal."""
