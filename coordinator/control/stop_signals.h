// Ctrl-C and its relatives, as questions the control loop can ask.
#pragma once

namespace oomb::control {

/// Catches SIGINT, SIGTERM, SIGHUP and SIGUSR1: each asks for a checkpoint and an orderly end; a second one (but
/// SIGUSR1) asks to end at once. SIGHUP stays ignored where it was (nohup). Also ignores SIGPIPE and SIGXFSZ, which
/// turn into errors of the calls at fault. Call once, before threads start.
void catch_stop_signals();

/// The first signal that asked for the end; 0 before that.
int stop_signal();

/// Whether a further one asked to end at once.
bool stop_at_once();

}  // namespace oomb::control
