# Every outside library, found once, all from Debian 12's packages (deploy/packages.txt lists them).
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(GTest REQUIRED)
find_package(benchmark REQUIRED)
find_package(hwy REQUIRED)
if(FP8KVD_SERVER)
  find_package(gRPC REQUIRED)
  find_package(spdlog REQUIRED)
  find_package(civetweb REQUIRED)
  find_package(prometheus-cpp REQUIRED)
  find_package(PkgConfig REQUIRED)
endif()

# Debian ships no CMake file for this one.
find_library(XXHASH_LIBRARY xxhash REQUIRED)
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
add_library(xxhash::xxhash UNKNOWN IMPORTED)
set_target_properties(xxhash::xxhash PROPERTIES
  IMPORTED_LOCATION ${XXHASH_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${XXHASH_INCLUDE_DIR})
