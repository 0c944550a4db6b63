// server/ops/http.h: the port for people, probes and Prometheus.
//   /livez         200, or 503 once the engine is stuck, which only a new process mends
//   /readyz        200 when it takes work, else 503 with the reason
//   /metrics       the scrape
//   /statusz       the status page (statusz.h), /statusz.json what it draws
//
// Threads: eight of its own, whatever the number of connections.
// Errors: UNAVAILABLE where the address cannot be listened on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

#include "server/ops/readiness.h"

struct mg_context;

namespace fp8kvd::ops {

// What is shown; outlives the server. Functions are called on its threads.
struct HttpPages {
  const Readiness* readiness = nullptr;
  std::function<std::string()> metrics;
  std::function<std::string()> status_json;
  std::function<bool()> is_stalled;
};

class HttpServer {
 public:
  // address: host:port; port 0 takes any free one.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           HttpPages pages);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  const HttpPages& pages() const { return pages_; }

 private:
  HttpServer(std::string host, HttpPages pages)
      : host_(std::move(host)), pages_(std::move(pages)) {}

  const std::string host_;  // that reaches it from here
  const HttpPages pages_;
  mg_context* context_ = nullptr;
};

}  // namespace fp8kvd::ops
