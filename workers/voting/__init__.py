"""How an agent makes its contribution of its records: by neighbours, or with models that it trains."""
