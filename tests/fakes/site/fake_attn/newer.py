attnmux_contract = "1.99"
