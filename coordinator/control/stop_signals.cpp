#include "coordinator/control/stop_signals.h"

#include <signal.h>

#include <initializer_list>

namespace oomb::control {
namespace {

volatile sig_atomic_t first_signal = 0;
volatile sig_atomic_t at_once = 0;

void on_signal(int number) {
  if (first_signal == 0) {
    first_signal = number;
  } else if (number != SIGUSR1) {
    at_once = 1;
  }
}

}  // namespace

void catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int number : {SIGINT, SIGTERM, SIGUSR1}) sigaction(number, &action, nullptr);
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

int stop_signal() { return first_signal; }
bool stop_at_once() { return at_once != 0; }

}  // namespace oomb::control
