"""Where a request's time goes on its way from prefill to decode; README.md says more."""
