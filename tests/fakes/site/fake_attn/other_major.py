attnmux_contract = "2.0"
