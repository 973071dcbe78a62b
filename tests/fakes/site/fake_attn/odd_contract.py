attnmux_contract = "one"
