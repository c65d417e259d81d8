#include "tests/comm/toy_step.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>

#include "comm/exchange/page_exchange.h"

namespace oomb::comm::test {

namespace {

std::uint64_t hash(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t h = 0xCBF29CE484222325ull;
  for (std::uint64_t part : parts) {
    for (int i = 0; i < 3; ++i) h = (h ^ (part >> (i * 21))) * 0x100000001B3ull, h ^= h >> 29;
  }
  return h;
}

class ToyWorker {
 public:
  ToyWorker(Transport& transport, const ToyOptions& options, ToyMemory* memory)
      : transport_(transport), options_(options), memory_(*memory) {
    const std::int64_t slots = 2 * options.num_pages;  // two chunk-layers
    memory_.resize(2);
    homes_ = &memory_[0];
    staging_ = &memory_[1];
    homes_->resize(static_cast<std::size_t>(options.num_layers * options.num_pages * options.page_values));
    staging_->resize(static_cast<std::size_t>(slots * options.page_values));
    home_segment_ = transport_.register_segment(homes_->data(), bytes_of(*homes_), MemoryKind::kHost, deadline());
    const SegmentId staging =
        transport_.register_segment(staging_->data(), bytes_of(*staging_), MemoryKind::kHost, deadline());
    PageExchange::Options exchange;
    exchange.page_bytes = page_bytes();
    exchange.staging = {{staging, 0}, page_bytes(), slots};
    exchange_.emplace(&transport_, exchange);
  }

  ToyResult run() {
    for (int step = 0; step < options_.num_steps; ++step) {
      for (int sequence = 0; sequence < options_.sequences_per_step; ++sequence) {
        shape_.id = {step, sequence};
        shape_.num_layers = options_.num_layers;
        shape_.num_pages = options_.num_pages - sequence;  // unequal lengths
        shape_.pages_per_chunk = options_.pages_per_chunk;
        shape_.num_workers = transport_.size();
        shape_.first_owner = static_cast<int>(hash({options_.seed, static_cast<std::uint64_t>(sequence)}) %
                                              static_cast<std::uint64_t>(transport_.size()));
        run_sequence();
      }
    }
    result_.duplicates = exchange_->counters().duplicates;
    result_.stale = exchange_->counters().stale;
    return result_;
  }

 private:
  static std::int64_t bytes_of(const std::vector<double>& values) {
    return static_cast<std::int64_t>(values.size() * sizeof(double));
  }
  std::int64_t page_bytes() const { return options_.page_values * static_cast<std::int64_t>(sizeof(double)); }
  Deadline deadline() const { return in_seconds(options_.deadline_seconds); }
  bool mine(std::int64_t chunk) const { return shape_.owner_of(chunk) == transport_.rank(); }
  double* home(std::int64_t layer, std::int64_t page) {
    return homes_->data() + (layer * options_.num_pages + page) * options_.page_values;
  }

  std::uint64_t key(std::int64_t layer, std::int64_t a, std::int64_t b) const {
    return hash({options_.seed, static_cast<std::uint64_t>(shape_.id.step),
                 static_cast<std::uint64_t>(shape_.id.sequence), static_cast<std::uint64_t>(layer),
                 static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)});
  }
  double page_value(std::int64_t layer, std::int64_t page, std::int64_t i) const {
    return static_cast<double>(key(layer, page, 1000000 + i) % 1000);
  }
  bool selected(std::int64_t layer, std::int64_t chunk, std::int64_t page) const {
    return static_cast<int>(key(layer, chunk, page) % 100) < options_.select_per_cent;
  }
  // Thirds do not add up exactly, so the order of a sum shows in its last bits.
  double gradient(std::int64_t layer, std::int64_t chunk, std::int64_t page, std::int64_t i) const {
    const auto whole = static_cast<double>(key(layer, chunk, page * 64 + i + 7) % 999);
    return options_.any_order ? whole : whole / 3.0;
  }

  void run_sequence() {
    exchange_->begin_sequence(shape_);
    gradients_.clear();
    const std::int64_t chunks = shape_.num_chunks();
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (!mine(chunk)) continue;
      for (std::int64_t layer = 0; layer < shape_.num_layers; ++layer) fill(layer, chunk);
    }
    const std::int64_t workers = transport_.size();
    for (std::int64_t round = (chunks - 1) / workers; round >= 0; --round) {
      for (std::int64_t layer = shape_.num_layers - 1; layer >= 0; --layer) {
        go_back(layer, round * workers, std::min(chunks, (round + 1) * workers));
      }
    }
    exchange_->end_sequence(deadline());
  }

  void fill(std::int64_t layer, std::int64_t chunk) {
    std::vector<RemoteAddress> addresses;
    std::vector<double> means;
    for (std::int64_t i = 0; i < shape_.pages_of(chunk); ++i) {
      const std::int64_t page = chunk * shape_.pages_per_chunk + i;
      double* values = home(layer, page);
      for (std::int64_t v = 0; v < options_.page_values; ++v) values[v] = page_value(layer, page, v);
      transport_.mark_readable(values, page_bytes());
      addresses.push_back({home_segment_, (values - homes_->data()) * static_cast<std::int64_t>(sizeof(double))});
      means.push_back(values[0]);
    }
    exchange_->publish(layer, chunk, addresses, std::as_bytes(std::span(means)));
    const std::int64_t since = std::max<std::int64_t>(0, chunk - transport_.size() + 1);
    for (std::int64_t earlier = since; earlier < chunk; ++earlier) take_means(layer, earlier);
    read_pages(layer, chunk);
  }

  void take_means(std::int64_t layer, std::int64_t chunk) {
    const std::vector<std::byte> means = exchange_->take_means(layer, chunk, deadline());
    for (std::int64_t i = 0; i < shape_.pages_of(chunk); ++i) {
      double value = 0;
      std::memcpy(&value, means.data() + i * static_cast<std::int64_t>(sizeof(double)), sizeof(double));
      expect(value == page_value(layer, chunk * shape_.pages_per_chunk + i, 0), "means", layer, chunk);
    }
  }

  void read_pages(std::int64_t layer, std::int64_t chunk) {
    std::vector<PageFetch> fetches;
    std::vector<double> cache(static_cast<std::size_t>(options_.num_pages * options_.page_values), -1);
    for (std::int64_t page = 0; page < chunk * shape_.pages_per_chunk; ++page) {
      if (mine(shape_.chunk_of(page)) || !selected(layer, chunk, page)) continue;
      fetches.push_back({layer, page, cache.data() + page * options_.page_values, MemoryKind::kHost});
    }
    memory_.push_back(std::move(cache));  // a get under way when something fails still has a target
    exchange_->wait(exchange_->get_pages(fetches), deadline());
    result_.pages_read += static_cast<std::int64_t>(fetches.size());
    for (const PageFetch& fetch : fetches) {
      for (std::int64_t v = 0; v < options_.page_values; ++v) {
        expect(static_cast<double*>(fetch.to)[v] == page_value(layer, fetch.page, v), "a page", layer, fetch.page);
      }
    }
    memory_.pop_back();
  }

  // One layer of the chunks [first, last) of a round, of which one or none is this worker's.
  void go_back(std::int64_t layer, std::int64_t first, std::int64_t last) {
    std::int64_t own = -1;
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      if (mine(chunk)) own = chunk;
    }
    if (own >= 0) {
      read_pages(layer, own);
      contribute(layer, own);
    }
    if (options_.any_order) {
      if (own < 0) return;  // whatever comes meanwhile is served in the next round
      add_own(layer, own);
      while (const auto note = exchange_->next_contribution(layer, own, deadline())) add(*note);
      finish_chunk(layer, own);
      return;
    }
    for (std::int64_t from = last - 1; from >= first; --from) {
      if (from == own) {
        finish_chunk(layer, own);
        add_own(layer, own);
      } else {
        for (const Contribution& note : exchange_->take_contributions(layer, from, deadline())) add(note);
      }
    }
  }

  void contribute(std::int64_t layer, std::int64_t chunk) {
    for (std::int64_t target = chunk - 1; target >= 0; --target) {
      if (mine(target)) continue;
      std::vector<std::int64_t> pages;
      for (std::int64_t i = 0; i < shape_.pages_per_chunk; ++i) {
        const std::int64_t page = target * shape_.pages_per_chunk + i;
        if (selected(layer, chunk, page)) pages.push_back(page);
      }
      // Two notes per chunk now and then.
      const std::size_t cut = pages.size() > 1 && key(layer, chunk, target) % 3 == 0 ? 1 : pages.size();
      announce(layer, target, chunk, std::span(pages).first(cut));
      announce(layer, target, chunk, std::span(pages).subspan(cut));
    }
    exchange_->finish(layer, chunk);
  }

  void announce(std::int64_t layer, std::int64_t target, std::int64_t chunk, std::span<const std::int64_t> pages) {
    if (pages.empty()) return;
    const auto slots = exchange_->acquire_staging(static_cast<std::int64_t>(pages.size()), deadline());
    std::vector<PageExchange::Staged> staged;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      double* values = staging_->data() + slots[i] * options_.page_values;
      for (std::int64_t v = 0; v < options_.page_values; ++v) values[v] = gradient(layer, chunk, pages[i], v);
      transport_.mark_readable(values, page_bytes());
      staged.push_back({pages[i], slots[i]});
    }
    exchange_->announce(layer, target, chunk, staged);
    result_.pages_contributed += static_cast<std::int64_t>(staged.size());
    ++result_.notes;
  }

  std::vector<double>& sum_of(std::int64_t layer, std::int64_t page) {
    auto& sum = gradients_[{layer, page}];
    sum.resize(static_cast<std::size_t>(options_.page_values));
    return sum;
  }

  void add_own(std::int64_t layer, std::int64_t chunk) {
    for (std::int64_t page = 0; page < chunk * shape_.pages_per_chunk; ++page) {
      if (!mine(shape_.chunk_of(page)) || !selected(layer, chunk, page)) continue;
      auto& sum = sum_of(layer, page);
      for (std::int64_t v = 0; v < options_.page_values; ++v) {
        sum[static_cast<std::size_t>(v)] += gradient(layer, chunk, page, v);
      }
    }
  }

  void add(const Contribution& note) {
    std::vector<double> fetched(note.pages.size() * static_cast<std::size_t>(options_.page_values));
    std::vector<void*> targets;
    for (std::size_t i = 0; i < note.pages.size(); ++i) {
      targets.push_back(fetched.data() + i * static_cast<std::size_t>(options_.page_values));
    }
    memory_.push_back(std::move(fetched));
    exchange_->wait(exchange_->get_staged(note, targets, MemoryKind::kHost), deadline());
    exchange_->acknowledge(note);
    for (std::size_t i = 0; i < note.pages.size(); ++i) {
      auto& sum = sum_of(note.layer, note.pages[i].page);
      for (std::size_t v = 0; v < sum.size(); ++v) sum[v] += static_cast<double*>(targets[i])[v];
    }
    memory_.pop_back();
  }

  // Every later chunk has contributed: the sums have the bits of adding in descending order of chunks.
  void finish_chunk(std::int64_t layer, std::int64_t chunk) {
    exchange_->wait_complete(layer, chunk, deadline());
    for (std::int64_t i = 0; i < shape_.pages_of(chunk); ++i) {
      const std::int64_t page = chunk * shape_.pages_per_chunk + i;
      for (std::int64_t v = 0; v < options_.page_values; ++v) {
        double right = 0;
        for (std::int64_t from = shape_.num_chunks() - 1; from > chunk; --from) {
          if (selected(layer, from, page)) right += gradient(layer, from, page, v);
        }
        expect(sum_of(layer, page)[static_cast<std::size_t>(v)] == right, "the gradient of a page", layer, page);
      }
      transport_.mark_freed(home(layer, page), page_bytes());
    }
  }

  void expect(bool right, const char* what, std::int64_t layer, std::int64_t which) const {
    if (!right) {
      throw std::runtime_error(std::string("worker ") + std::to_string(transport_.rank()) +
                               " has a wrong value: " + what + ", layer " + std::to_string(layer) + ", number " +
                               std::to_string(which) + " of step " + std::to_string(shape_.id.step) + ", sequence " +
                               std::to_string(shape_.id.sequence));
    }
  }

  Transport& transport_;
  const ToyOptions options_;
  ToyMemory& memory_;
  std::vector<double>* homes_ = nullptr;
  std::vector<double>* staging_ = nullptr;
  SegmentId home_segment_ = 0;
  std::optional<PageExchange> exchange_;
  SequenceShape shape_;
  ToyResult result_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<double>> gradients_;
};

}  // namespace

ToyResult run_toy_steps(Transport& transport, const ToyOptions& options, ToyMemory* memory) {
  return ToyWorker(transport, options, memory).run();
}

}  // namespace oomb::comm::test
