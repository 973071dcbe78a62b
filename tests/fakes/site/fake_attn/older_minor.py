attnmux_contract = "1.0"
