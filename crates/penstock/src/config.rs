//! Every setting, in one place, with one order of precedence: keyword, then environment, then found by itself.
